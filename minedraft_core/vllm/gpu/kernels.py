"""The small kernels of a draft job, each beside a reference in plain torch that the tests compare it with.

A job travels as rows of 32-bit integers, one a request: `HEADER` fields, then the request's row of the target's block table. Fields 0 to
4 are the last two tokens, the position of the last one, whether the row is drafted for, and the temperature's bits; fields 6 and 7 hold
the 64-bit seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = 8
PAD_SLOT = -1
_BLOCK = 256


@triton.jit(do_not_specialize=["num_reqs"])
def _pack_kernel(
    out,
    out_float,
    out_long,
    stride,
    idx_mapping,
    query_start_loc,
    input_ids,
    num_sampled,
    num_rejected,
    last_sampled,
    num_computed,
    temperature,
    seeds,
    table,
    table_stride,
    width,
    num_reqs,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    live = row < num_reqs
    slot = tl.load(idx_mapping + row, mask=live, other=0)
    end = tl.load(query_start_loc + row + 1, mask=live, other=1)
    sampled = tl.load(num_sampled + row, mask=live, other=0)
    rejected = tl.load(num_rejected + row, mask=live, other=0)
    valid = live & (sampled > 0)
    base = row.to(tl.int64) * stride
    tl.store(out + base, tl.load(input_ids + end - rejected - 1, mask=valid, other=0).to(tl.int32))
    tl.store(out + base + 1, tl.load(last_sampled + slot, mask=valid, other=0).to(tl.int32))
    tl.store(out + base + 2, tl.load(num_computed + slot, mask=valid, other=1).to(tl.int32))
    tl.store(out + base + 3, valid.to(tl.int32))
    tl.store(out_float + base + 4, tl.load(temperature + slot, mask=valid, other=0.0))
    tl.store(out_long + base // 2 + 3, tl.load(seeds + slot, mask=valid, other=0))
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        blocks = tl.load(table + row.to(tl.int64) * table_stride + column, mask=inside, other=0)
        tl.store(out + base + 8 + column, tl.where(live, blocks, 0), mask=inside)


@dataclass(frozen=True)
class Verified:
    """A batch that the target has verified, with the first `num_reqs` of its requests.

    idx_mapping: int64 [num_reqs], a request's slot. query_start_loc: int32 [num_reqs + 1]. input_ids: int32 [tokens]. num_sampled,
    num_rejected: int32 [num_reqs]. last_sampled: int64 [slots, 1]. num_computed: int32 [slots], the position of the last sampled token.
    """

    num_reqs: int
    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    input_ids: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    num_computed: torch.Tensor


def pack(out: torch.Tensor, batch: Verified, temperature: torch.Tensor, seeds: torch.Tensor, table: torch.Tensor) -> None:
    """Fill the rows of `out`, int32 [bucket, HEADER + blocks], from a verified batch.

    temperature: float32 [slots], seeds: int64 [slots]. table: int32 [rows, blocks], in the order of the batch. A request that sampled
    nothing, and rows past the batch, are marked as not drafted for.
    """
    _pack_kernel[(out.shape[0],)](
        out,
        out.view(torch.float32),
        out.view(torch.int64),
        out.stride(0),
        batch.idx_mapping,
        batch.query_start_loc,
        batch.input_ids,
        batch.num_sampled,
        batch.num_rejected,
        batch.last_sampled,
        batch.num_computed,
        temperature,
        seeds,
        table,
        table.stride(0),
        table.shape[1],
        batch.num_reqs,
        BLOCK=_BLOCK,
    )


def pack_reference(out: torch.Tensor, batch: Verified, temperature: torch.Tensor, seeds: torch.Tensor, table: torch.Tensor) -> None:
    """`pack` in plain torch."""
    out.zero_()
    out[:, 2] = 1
    out[: batch.num_reqs, HEADER : HEADER + table.shape[1]] = table[: batch.num_reqs]
    rows = torch.nonzero(batch.num_sampled[: batch.num_reqs] > 0).flatten()
    slots = batch.idx_mapping[rows]
    out[rows, 0] = batch.input_ids[(batch.query_start_loc[1:][rows] - batch.num_rejected[rows] - 1).long()].to(torch.int32)
    out[rows, 1] = batch.last_sampled.flatten()[slots].to(torch.int32)
    out[rows, 2] = batch.num_computed[slots].to(torch.int32)
    out[rows, 3] = 1
    out.view(torch.float32)[rows, 4] = temperature[slots]
    out.view(torch.int64)[rows, 3] = seeds[slots]


@triton.jit
def slot_at(row, position, inside, BLOCK_SIZE: tl.constexpr):
    """Where the KV of a position lies, by the block table of a packed row; -1 where it is not inside."""
    block = tl.load(row + 8 + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return tl.where(inside, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)


@triton.jit
def _first_kernel(
    pack,
    pack_float,
    pack_long,
    stride,
    ids,
    positions,
    slots,
    seq_lens,
    temperature,
    seeds,
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
    MAX_LEN: tl.constexpr,
):
    row = tl.program_id(0)
    base = row.to(tl.int64) * stride
    valid = tl.load(pack + base + 3) > 0
    position = tl.where(valid, tl.load(pack + base + 2), 1)
    before = position - 1
    inside = valid & (position < MAX_LEN)
    inside_before = valid & (before < MAX_LEN)
    tl.store(ids + 2 * row, tl.minimum(tl.maximum(tl.load(pack + base), 0), vocab_size - 1))
    tl.store(ids + 2 * row + 1, tl.minimum(tl.maximum(tl.load(pack + base + 1), 0), vocab_size - 1))
    tl.store(positions + 2 * row, tl.minimum(before, MAX_LEN - 1).to(tl.int64))
    tl.store(positions + 2 * row + 1, tl.minimum(position, MAX_LEN - 1).to(tl.int64))
    tl.store(slots + 2 * row, slot_at(pack + base, before, inside_before, BLOCK_SIZE))
    tl.store(slots + 2 * row + 1, slot_at(pack + base, position, inside, BLOCK_SIZE))
    tl.store(seq_lens + row, tl.minimum(position + 1, MAX_LEN))
    tl.store(temperature + row, tl.load(pack_float + base + 4))
    tl.store(seeds + row, tl.load(pack_long + base // 2 + 3))


def first_inputs(
    packed: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    vocab_size: int,
    block_size: int,
    max_len: int,
) -> None:
    """Inputs of the first draft step: the last two tokens of each request, two rows each.

    Two suffice: whatever was accepted, the drafter's cache lacks at most the last two positions. Ids outside the vocabulary, such as
    placeholders of images, are clamped. packed: [n, HEADER + blocks]. Fills ids
    int32 [2 n], positions int64 [2 n], slots int64 [2 n] (PAD_SLOT where nothing may be written), seq_lens int32 [n], temperature float32
    [n], seeds int64 [n].
    """
    _first_kernel[(packed.shape[0],)](
        packed,
        packed.view(torch.float32),
        packed.view(torch.int64),
        packed.stride(0),
        ids,
        positions,
        slots,
        seq_lens,
        temperature,
        seeds,
        vocab_size,
        BLOCK_SIZE=block_size,
        MAX_LEN=max_len,
    )


def first_inputs_reference(
    packed: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    vocab_size: int,
    block_size: int,
    max_len: int,
) -> None:
    """`first_inputs` in plain torch."""
    valid = packed[:, 3] > 0
    last = torch.where(valid, packed[:, 2], 1).long()
    both = torch.stack([last - 1, last], dim=1)
    ids.copy_(packed[:, :2].flatten().clamp(0, vocab_size - 1))
    positions.copy_(both.clamp(max=max_len - 1).flatten())
    slots.copy_(slots_of(packed, both, valid[:, None], block_size, max_len).flatten())
    seq_lens.copy_((last + 1).clamp(max=max_len))
    temperature.copy_(packed.view(torch.float32)[:, 4])
    seeds.copy_(packed.view(torch.int64)[:, 3])


@triton.jit
def _next_kernel(
    pack,
    stride,
    drafts,
    drafts_stride,
    ids,
    positions,
    slots,
    seq_lens,
    vocab_size,
    STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_LEN: tl.constexpr,
):
    row = tl.program_id(0)
    base = row.to(tl.int64) * stride
    valid = tl.load(pack + base + 3) > 0
    position = tl.where(valid, tl.load(pack + base + 2) + STEP, 1)
    inside = valid & (position < MAX_LEN)
    token = tl.load(drafts + row * drafts_stride + STEP - 1)
    tl.store(ids + row, tl.minimum(tl.maximum(token, 0), vocab_size - 1).to(tl.int32))
    tl.store(positions + row, tl.minimum(position, MAX_LEN - 1).to(tl.int64))
    tl.store(slots + row, slot_at(pack + base, position, inside, BLOCK_SIZE))
    tl.store(seq_lens + row, tl.minimum(position + 1, MAX_LEN))


def next_inputs(
    packed: torch.Tensor,
    drafts: torch.Tensor,
    step: int,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    vocab_size: int,
    block_size: int,
    max_len: int,
) -> None:
    """Inputs of draft step `step` >= 1: the token drafted in the step before, from drafts int64 [n, k].

    Shapes as in `first_inputs`, one row each.
    """
    _next_kernel[(packed.shape[0],)](
        packed,
        packed.stride(0),
        drafts,
        drafts.stride(0),
        ids,
        positions,
        slots,
        seq_lens,
        vocab_size,
        STEP=step,
        BLOCK_SIZE=block_size,
        MAX_LEN=max_len,
    )


def next_inputs_reference(
    packed: torch.Tensor,
    drafts: torch.Tensor,
    step: int,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    vocab_size: int,
    block_size: int,
    max_len: int,
) -> None:
    """`next_inputs` in plain torch."""
    valid = packed[:, 3] > 0
    position = torch.where(valid, packed[:, 2] + step, 1).long()
    ids.copy_(drafts[:, step - 1].clamp(0, vocab_size - 1))
    positions.copy_(position.clamp(max=max_len - 1))
    slots.copy_(slots_of(packed, position[:, None], valid[:, None], block_size, max_len).flatten())
    seq_lens.copy_((position + 1).clamp(max=max_len))


def slots_of(packed: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor, block_size: int, max_len: int) -> torch.Tensor:
    """`slot_at` in plain torch: int64 like positions [n, m], PAD_SLOT where a position is not valid or not below `max_len`."""
    inside = valid & (positions < max_len)
    column = torch.where(inside, positions // block_size, 0) + HEADER
    blocks = packed.gather(1, column).long()
    return torch.where(inside, blocks * block_size + positions % block_size, PAD_SLOT)


def row_width(num_blocks: int) -> int:
    """Columns of a row for a block table of `num_blocks` columns: whole 16 bytes, so that every row and its seed are aligned."""
    return -(-(HEADER + num_blocks) // 4) * 4


def buckets(max_num_reqs: int, sizes: Sequence[int] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)) -> tuple[int, ...]:
    """The batch sizes that draft graphs are captured for; the largest is `max_num_reqs`."""
    return (*(size for size in sizes if size < max_num_reqs), max_num_reqs)
