"""Attention of a draft step, with the write of its KV and what precedes it in a layer: see `decode_kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from minedraft_core.vllm.gpu.decode_kernels import decode_kernel

MAX_QUERIES = 2
_MOST_PARTS = 8
_LEAST_ROWS = 16  # of a product on tensor cores
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Scratch:
    """Where the parts of a context meet, on one device. Used by one launch after the other; `arrived` is zero between them.

    sums float32 [parts in flight x rows x head], stats float32 [parts in flight x rows x 2], arrived int32 [requests x KV heads].
    """

    sums: torch.Tensor
    stats: torch.Tensor
    arrived: torch.Tensor


@dataclass(frozen=True)
class Turn:
    """What precedes attention, done by its kernel.

    positions int64 [tokens]; angles [positions, head], in the model's type: the cosines of a position, then its sines, for halves that are
    turned into each other. `norms`: of the queries' and of the keys' heads, [head] each, if the model has them. `chained`: the kernel
    may start before the one before it has ended. Only queries, keys and values may then come from chained kernels; all else was
    written before the last kernel that was launched the ordinary way.
    """

    positions: torch.Tensor
    angles: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    eps: float
    chained: bool


@dataclass(frozen=True)
class Heads:
    """What is the same in all layers, and how they are run: so many tokens at a time, and so many at least for a part of a context."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    multiprocessors: int
    block: int = 64
    shortest: int = 64
    warps: int = 8

    @property
    def supported(self) -> bool:
        """Whether the kernel has a shape for these."""
        return self.head_size in (32, 64, 128, 256)

    @property
    def rows(self) -> int:
        """Query rows of a program: a power of two."""
        return max(_LEAST_ROWS, triton.next_power_of_2(MAX_QUERIES * self.num_heads // self.num_kv_heads))

    def parts(self, num_reqs: int) -> int:
        """Most parts of a context: about one program a multiprocessor."""
        room = self.multiprocessors // (num_reqs * self.num_kv_heads)
        return next(parts for parts in (_MOST_PARTS, 4, 2, 1) if parts <= max(1, room))

    def constants(self, num_reqs: int, num_queries: int, block_size: int) -> dict[str, int]:
        """What the kernel is compiled for."""
        return {
            "QUERIES": num_queries,
            "GROUP": self.num_heads // self.num_kv_heads,
            "HEAD": self.head_size,
            "PAGE": block_size,
            "BLOCK": self.block,
            "ROWS": self.rows,
            "LIVE": triton.next_power_of_2(num_queries * self.num_heads // self.num_kv_heads),
            "PARTS": self.parts(num_reqs),
            "SHORTEST": self.shortest,
        }

    def scratch(self, max_num_reqs: int, device: torch.device) -> Scratch:
        """Room for every batch of up to `max_num_reqs` requests."""
        parts = max(num_reqs * self.num_kv_heads * self.parts(num_reqs) for num_reqs in range(1, max_num_reqs + 1))
        return Scratch(
            torch.zeros(parts * self.rows * self.head_size, dtype=torch.float32, device=device),
            torch.zeros(parts * self.rows * 2, dtype=torch.float32, device=device),
            torch.zeros(max_num_reqs * self.num_kv_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class DraftStep:
    """Where the tokens of a draft step are, one or two new ones a request, the same number for all; vLLM's attention metadata of it.

    table int32 [requests, blocks], seq_lens int32 [requests] with the new tokens, slots int64 [tokens], negative where nothing may be
    written; all on the drafter's device.
    """

    heads: Heads
    scratch: Scratch
    table: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor


def decode(
    step: DraftStep,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    turn: Turn | None = None,
) -> None:
    """Write the KV of the new tokens and attend causally.

    query [tokens, heads, head], key and value [tokens, KV heads, head], output like query; heads of a token are contiguous. cache
    [blocks, KV heads, block, 2 head], keys before values.
    """
    heads, scratch, num_reqs = step.heads, step.scratch, step.seq_lens.shape[0]
    query_norm, key_norm = (query, key) if turn is None or turn.norms is None else turn.norms
    decode_kernel[(num_reqs, heads.num_kv_heads, heads.parts(num_reqs))](
        query,
        key,
        value,
        cache,
        output,
        step.table,
        step.seq_lens,
        step.slots,
        scratch.sums,
        scratch.stats,
        scratch.arrived,
        step.slots if turn is None else turn.positions,
        query if turn is None else turn.angles,
        query_norm,
        key_norm,
        scale * _LOG2_E,
        0.0 if turn is None else turn.eps,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        output.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        step.table.stride(0),
        **heads.constants(num_reqs, query.shape[0] // num_reqs, cache.shape[2]),
        TURNED=turn is not None,
        NORMED=turn is not None and turn.norms is not None,
        CHAINED=turn is not None and turn.chained,
        launch_pdl=turn is not None and turn.chained,
        num_warps=heads.warps,
    )
