"""The drafter's chains: what it wrote after each request's context, on its own device, and the step that makes them longer by a token.

A draft is a piece of a chain. So a request whose tokens came as the drafter wrote them has its next draft in its chain already, and the
same step that drafts anew for others drafts ahead for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minedraft_core.vllm.gpu.chain_kernels import chain_inputs, extend, ring_length, settle
from minedraft_core.vllm.gpu.draws import draw
from minedraft_core.vllm.gpu.kernels import HEADER
from minedraft_core.vllm.gpu.model import DraftModel
from minedraft_core.vllm.gpu.word_kernels import gather_logits, publish

FIRST, NEXT = 2, 1
"""Tokens of each request that a job's first step runs, and every further one: the KV cache may lack the context's last two."""


@dataclass(frozen=True)
class ChainShape:
    """Sizes that never change: slots of the target's state, draft tokens, tokens of a block, longest context of the drafter."""

    num_slots: int
    num_drafts: int
    block_size: int
    max_len: int


class DraftChains:
    """Chains by slot, on one device. `logits` [slots, ring, vocabulary] keeps what drawn tokens were drawn from, where any are."""

    def __init__(self, model: DraftModel, shape: ChainShape, logits: torch.Tensor | None, *, use_fp64: bool) -> None:
        self._model, self._shape, self._logits, self._use_fp64 = model, shape, logits, use_fp64
        slots, device = shape.num_slots, model.device

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self._tokens = zeros(slots, ring_length(shape.num_drafts), dtype=torch.int64)
        self._last, self._base = zeros(slots), zeros(slots)
        self._temperature, self._seeds = zeros(slots, dtype=torch.float32), zeros(slots, dtype=torch.int64)
        self._row_slots, self._row_bases = zeros(slots) - 1, zeros(slots)
        self._ids, self._positions = zeros(FIRST * slots), zeros(FIRST * slots, dtype=torch.int64)
        self._slots, self._seq_lens = zeros(FIRST * slots, dtype=torch.int64), zeros(slots)
        self._draw_slots, self._columns = zeros(slots), zeros(slots, dtype=torch.int64)
        self._starts = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self._starts_by_two = FIRST * self._starts

    def settle(self, packed: torch.Tensor, tallies: torch.Tensor, tally: int) -> None:
        """Take in what the target delivered, packed int32 [n, HEADER + blocks] with marks: see the kernel."""
        settle(
            packed,
            self._tokens,
            self._last,
            self._base,
            self._temperature,
            self._seeds,
            self._row_slots,
            self._row_bases,
            tallies,
            tally,
            self._shape.num_drafts,
        )

    def step(self, packed: torch.Tensor, width: int, *, sampled: bool) -> None:
        """One pass of the model: a token more on each chain that is not as long as of use. `width` is FIRST or NEXT."""
        rows, shape, model = packed.shape[0], self._shape, self._model
        ids, positions, slots = self._ids[: width * rows], self._positions[: width * rows], self._slots[: width * rows]
        chain_inputs(
            packed,
            self._tokens,
            self._last,
            self._row_slots,
            self._row_bases,
            ids,
            positions,
            slots,
            self._seq_lens[:rows],
            self._draw_slots,
            self._columns,
            model.vocab_size,
            shape.num_drafts,
            width,
            shape.block_size,
            shape.max_len,
        )
        starts = self._starts if width == NEXT else self._starts_by_two
        hidden = model.hidden(
            ids, positions, slots, starts[: rows + 1], self._seq_lens[:rows], packed[:, HEADER:], width, shape.max_len, planned=True
        )
        tokens = self._choose(hidden[width - 1 :: width].contiguous(), positions[width - 1 :: width], rows, sampled=sampled)
        extend(self._tokens, self._last, self._draw_slots, tokens)

    def publish(self, words: torch.Tensor, number: int) -> None:
        """Write the drafts that are ready as words of job `number`, int64 [n, k]: see the kernel."""
        publish(words, self._tokens, self._last, self._row_slots, self._row_bases, number)

    def gather(self, out: torch.Tensor) -> None:
        """Copy the logits of the drafts that are ready to out [n, k, vocabulary]."""
        assert self._logits is not None
        gather_logits(out, self._logits, self._last, self._row_slots, self._row_bases)

    def _choose(self, hidden: torch.Tensor, positions: torch.Tensor, rows: int, *, sampled: bool) -> torch.Tensor:
        """The token after each row: the argmax, or a draw with the noise that the same place always gets, its logits kept."""
        logits = self._model.logits(hidden)
        if not sampled:
            return logits.argmax(dim=-1)
        assert self._logits is not None
        return draw(
            logits,
            self._logits,
            self._draw_slots[:rows],
            self._columns[:rows],
            self._temperature,
            self._seeds,
            positions,
            use_fp64=self._use_fp64,
        )
