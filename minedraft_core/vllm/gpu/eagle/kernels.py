"""The small kernels of an EAGLE job, each beside a reference in plain torch that the tests compare it with.

An EAGLE head reads at position p the token of position p + 1 and the target's hidden states of position p. After a pass it reads anew
every row that the target ran and kept, at most k + 1 a request, since what it wrote for them while drafting came from its own hidden
states. A job's rows are those of `kernels.pack`, with the position of the last row in field 2, the number of rows in field 5, and after
the block table k + 1 tokens; rows and tokens end with the last one, what is missing before them is 0. The hidden states travel beside
them in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minedraft_core.vllm.gpu.kernels import Verified, slot_at, slots_of

_BLOCK = 1024
_COUNT = 5


@triton.jit(do_not_specialize=["num_reqs"])
def _shift_kernel(
    out,
    stride,
    column,
    idx_mapping,
    query_start_loc,
    input_ids,
    num_sampled,
    num_rejected,
    last_sampled,
    num_computed,
    num_reqs,
    LENGTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    live = row < num_reqs
    slot = tl.load(idx_mapping + row, mask=live, other=0)
    start = tl.load(query_start_loc + row, mask=live, other=0)
    end = tl.load(query_start_loc + row + 1, mask=live, other=1)
    end -= tl.load(num_rejected + row, mask=live, other=0)
    valid = live & (tl.load(num_sampled + row, mask=live, other=0) > 0)
    count = tl.where(valid, tl.minimum(end - start, LENGTH), 0)
    place = tl.arange(0, PADDED)
    before = (place >= LENGTH - count) & (place < LENGTH - 1)
    ids = tl.load(input_ids + end - LENGTH + place + 1, mask=before, other=0).to(tl.int32)
    last = tl.load(last_sampled + slot, mask=valid, other=0).to(tl.int32)
    base = row.to(tl.int64) * stride
    tl.store(out + base + column + place, tl.where(place == LENGTH - 1, last, ids), mask=place < LENGTH)
    tl.store(out + base + 2, tl.load(num_computed + slot, mask=valid, other=1).to(tl.int32) - 1)
    tl.store(out + base + 5, count)


@triton.jit(do_not_specialize=["num_reqs"])
def _carry_kernel(
    hidden,
    hidden_stride,
    first,
    source,
    source_stride,
    width,
    rows,
    rows_stride,
    query_start_loc,
    num_rejected,
    num_reqs,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row, place = program // LENGTH, program % LENGTH
    live = row < num_reqs
    end = tl.load(query_start_loc + row + 1, mask=live, other=1)
    end -= tl.load(num_rejected + row, mask=live, other=0)
    count = tl.load(rows + row.to(tl.int64) * rows_stride + 5)
    # Requests past the batch have 0 rows.
    known = tl.where(place >= LENGTH - count, width, 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    taken = tl.load(source + (end - LENGTH + place).to(tl.int64) * source_stride + column, mask=column < known, other=0.0)
    tl.store(hidden + program.to(tl.int64) * hidden_stride + first + column, taken, mask=inside)


def carry(rows: torch.Tensor, column: int, hidden: torch.Tensor, sources: Sequence[torch.Tensor], batch: Verified) -> None:
    """Complete the packed `rows`, int32 [bucket, columns], from `column` on, and fill `hidden` [bucket, k + 1, width].

    sources: the target's hidden states, each [tokens, part]; their parts side by side are the width. A request that sampled nothing, and
    rows past the batch, get zeros.
    """
    bucket, length, _ = hidden.shape
    _shift_kernel[(bucket,)](
        rows,
        rows.stride(0),
        column,
        batch.idx_mapping,
        batch.query_start_loc,
        batch.input_ids,
        batch.num_sampled,
        batch.num_rejected,
        batch.last_sampled,
        batch.num_computed,
        batch.num_reqs,
        LENGTH=length,
        PADDED=triton.next_power_of_2(length),
    )
    first = 0
    for source in sources:
        part = source.shape[1]
        _carry_kernel[(bucket * length, triton.cdiv(part, _BLOCK))](
            hidden,
            hidden.stride(1),
            first,
            source,
            source.stride(0),
            part,
            rows,
            rows.stride(0),
            batch.query_start_loc,
            batch.num_rejected,
            batch.num_reqs,
            LENGTH=length,
            BLOCK=_BLOCK,
        )
        first += part


def carry_reference(rows: torch.Tensor, column: int, hidden: torch.Tensor, sources: Sequence[torch.Tensor], batch: Verified) -> None:
    """`carry` in plain torch."""
    length = hidden.shape[1]
    hidden.zero_()
    rows[:, column : column + length] = 0
    rows[:, 2], rows[:, _COUNT] = 0, 0
    for row in range(batch.num_reqs):
        if not batch.num_sampled[row]:
            continue
        slot = batch.idx_mapping[row]
        end = int(batch.query_start_loc[row + 1] - batch.num_rejected[row])
        count = min(end - int(batch.query_start_loc[row]), length)
        rows[row, column + length - count : column + length - 1] = batch.input_ids[end - count + 1 : end].to(torch.int32)
        rows[row, column + length - 1] = batch.last_sampled.flatten()[slot].to(torch.int32)
        rows[row, 2], rows[row, _COUNT] = batch.num_computed[slot] - 1, count
        hidden[row, length - count :] = torch.cat([source[end - count : end] for source in sources], dim=1)


@triton.jit
def _first_rows_kernel(
    pack,
    pack_float,
    pack_long,
    stride,
    column,
    ids,
    positions,
    slots,
    seq_lens,
    temperature,
    seeds,
    vocab_size,
    LENGTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_LEN: tl.constexpr,
):
    row = tl.program_id(0)
    base = row.to(tl.int64) * stride
    last, count = tl.load(pack + base + 2), tl.load(pack + base + 5)
    place = tl.arange(0, PADDED)
    inside = place < LENGTH
    position = last - (LENGTH - 1) + place
    known = inside & (place >= LENGTH - count) & (position < MAX_LEN)
    token = tl.load(pack + base + column + place, mask=inside, other=0)
    out = row * LENGTH + place
    tl.store(ids + out, tl.minimum(tl.maximum(token, 0), vocab_size - 1), mask=inside)
    tl.store(positions + out, tl.minimum(tl.maximum(position, 0), MAX_LEN - 1).to(tl.int64), mask=inside)
    tl.store(slots + out, slot_at(pack + base, position, known, BLOCK_SIZE), mask=inside)
    tl.store(seq_lens + row, tl.minimum(last + 1, MAX_LEN))
    tl.store(temperature + row, tl.load(pack_float + base + 4))
    tl.store(seeds + row, tl.load(pack_long + base // 2 + 3))


def first_rows(
    packed: torch.Tensor,
    column: int,
    length: int,
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
    """Inputs of the first draft step of a head: `length` rows a request, of which the last ones count.

    packed: [n, columns], its tokens from `column` on. Fills ids int32 [length n], positions int64 [length n], slots int64 [length n]
    (PAD_SLOT where nothing may be written), seq_lens int32 [n], temperature float32 [n], seeds int64 [n].
    """
    _first_rows_kernel[(packed.shape[0],)](
        packed,
        packed.view(torch.float32),
        packed.view(torch.int64),
        packed.stride(0),
        column,
        ids,
        positions,
        slots,
        seq_lens,
        temperature,
        seeds,
        vocab_size,
        LENGTH=length,
        PADDED=triton.next_power_of_2(length),
        BLOCK_SIZE=block_size,
        MAX_LEN=max_len,
    )


def first_rows_reference(
    packed: torch.Tensor,
    column: int,
    length: int,
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
    """`first_rows` in plain torch."""
    requests, places = packed.shape[0], torch.arange(length, device=packed.device)
    last, count = packed[:, 2].long(), packed[:, _COUNT]
    place = last[:, None] - (length - 1) + places
    known = places >= length - count[:, None]
    ids[: length * requests] = packed[:, column : column + length].clamp(0, vocab_size - 1).flatten()
    positions[: length * requests] = place.clamp(0, max_len - 1).flatten()
    slots[: length * requests] = slots_of(packed, place, known, block_size, max_len).flatten()
    seq_lens[:requests] = (last + 1).clamp(max=max_len)
    temperature[:requests] = packed.view(torch.float32)[:, 4]
    seeds[:requests] = packed.view(torch.int64)[:, 3]


def shifted(
    input_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill: torch.Tensor,
) -> torch.Tensor:
    """What a head reads in a batch with prompts in it: of every row that was kept, the token after it. int32 [tokens].

    After the last row of a request comes the token that was sampled, after a prompt's chunk the prompt's next one. next_prefill: int32
    [1, slots]. Shapes else as in `kernels.Verified`, without padding. Nothing waits for the device.
    """
    ids = input_ids.roll(-1)
    following = torch.where(num_sampled > 0, last_sampled.flatten()[idx_mapping].to(ids.dtype), next_prefill[0, idx_mapping].to(ids.dtype))
    ids[(query_start_loc[1:] - num_rejected - 1).long()] = following
    return ids
