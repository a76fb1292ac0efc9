"""The small kernels of drafting ahead, each beside a reference in plain torch that the tests compare it with.

A chain is what the drafter wrote after a request's context. It lies in a ring: the token of position p in column p modulo the ring's
length, in the row of the request's slot in the target's state. `last` is the position of a chain's last token, `base` that of the last
token of the context that it was checked against.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minedraft_core.vllm.gpu.kernels import slot_at, slots_of

MARK = 5
"""The field of a packed row that holds the request's slot plus one, negative where its chain cannot go on."""
TALLIES = 4
"""Fields of a tally: hits, misses, discarded tokens, and one unused."""


def ring_length(num_drafts: int) -> int:
    """Columns of a chain: the context's last two tokens, a draft, the token after it and the next draft, but for one.

    The last of them takes the place of the first, which is needed only while a chain holds no draft.
    """
    return 2 * num_drafts + 2


@triton.jit
def _mark_kernel(out, stride, idx_mapping, num_rejected, num_computed, prefill_len):
    row = tl.program_id(0)
    slot = tl.load(idx_mapping + row)
    follows = (tl.load(num_rejected + row) == 0) & (tl.load(num_computed + slot) > tl.load(prefill_len + slot))
    tl.store(out + row.to(tl.int64) * stride + 5, tl.where(follows, slot + 1, -slot - 1).to(tl.int32))


def mark(
    out: torch.Tensor, idx_mapping: torch.Tensor, num_rejected: torch.Tensor, num_computed: torch.Tensor, prefill_len: torch.Tensor
) -> None:
    """Write the field MARK of the packed rows, int32 [>= num_reqs, HEADER + blocks].

    A chain can go on where the target accepted all it verified and the pass was no prompt's. So no draft is kept that took part in a
    verification, where a verifier may have looked at it before it rejected one. idx_mapping: int64 [num_reqs]. num_rejected: int32
    [num_reqs]. num_computed, prefill_len: int32 [slots].
    """
    _mark_kernel[(idx_mapping.shape[0],)](out, out.stride(0), idx_mapping, num_rejected, num_computed, prefill_len)


def mark_reference(
    out: torch.Tensor, idx_mapping: torch.Tensor, num_rejected: torch.Tensor, num_computed: torch.Tensor, prefill_len: torch.Tensor
) -> None:
    """`mark` in plain torch."""
    count = idx_mapping.shape[0]
    follows = (num_rejected[:count] == 0) & (num_computed[idx_mapping] > prefill_len[idx_mapping])
    out[:count, MARK] = torch.where(follows, idx_mapping + 1, -idx_mapping - 1).to(torch.int32)


@triton.jit(do_not_specialize=["tally", "num_rows"])
def _settle_kernel(
    pack,
    pack_float,
    pack_long,
    stride,
    chains,
    last,
    base,
    temperature,
    seeds,
    row_slots,
    row_bases,
    tallies,
    tally,
    num_rows,
    DRAFTS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.arange(0, BLOCK)
    live = row < num_rows
    at = row.to(tl.int64) * stride
    valid = live & (tl.load(pack + at + 3, mask=live, other=0) > 0)
    marked = tl.load(pack + at + 5, mask=valid, other=1)
    slot = tl.where(marked < 0, -marked, marked) - 1
    before, token = tl.load(pack + at, mask=valid, other=0), tl.load(pack + at + 1, mask=valid, other=0)
    position = tl.load(pack + at + 2, mask=valid, other=1)
    end = tl.load(last + slot, mask=valid, other=0)
    ahead = tl.maximum(end - tl.load(base + slot, mask=valid, other=0) - DRAFTS, 0)
    held = tl.load(chains + slot * RING + position % RING, mask=valid, other=-1)
    alive = valid & (marked > 0) & (end >= position) & (held == token)
    tl.store(chains + slot * RING + position % RING, token.to(tl.int64), mask=valid)
    tl.store(chains + slot * RING + (position - 1) % RING, before.to(tl.int64), mask=valid)
    tl.store(last + slot, tl.where(alive, end, position), mask=valid)
    tl.store(base + slot, position, mask=valid)
    tl.store(temperature + slot, tl.load(pack_float + at + 4, mask=valid, other=0.0), mask=valid)
    tl.store(seeds + slot, tl.load(pack_long + at // 2 + 3, mask=valid, other=0), mask=valid)
    tl.store(row_slots + row, tl.where(valid, slot, -1), mask=live)
    tl.store(row_bases + row, position, mask=live)
    was_ahead = valid & (ahead > 0)
    tl.store(tallies + tally * 4, tl.sum((was_ahead & alive).to(tl.int64)))
    tl.store(tallies + tally * 4 + 1, tl.sum((was_ahead & (alive == 0)).to(tl.int64)))
    tl.store(tallies + tally * 4 + 2, tl.sum(tl.where(was_ahead & (alive == 0), ahead, 0).to(tl.int64)))


def settle(
    packed: torch.Tensor,
    chains: torch.Tensor,
    last: torch.Tensor,
    base: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    row_slots: torch.Tensor,
    row_bases: torch.Tensor,
    tallies: torch.Tensor,
    tally: int,
    num_drafts: int,
) -> None:
    """Decide which chains go on after a verification, begin the others anew, and count.

    A chain goes on where it is marked so and its token at the place of the target's last one is that token.

    packed: int32 [n, HEADER + blocks]. chains: int64 [slots, ring]; last, base: int32 [slots]; temperature: float32 [slots]; seeds: int64
    [slots]. Fills row_slots int32 [>= n], -1 for rows that are not drafted for, row_bases int32 [>= n], and row `tally` of tallies, int64
    [m, TALLIES].
    """
    rows = packed.shape[0]
    _settle_kernel[(1,)](
        packed,
        packed.view(torch.float32),
        packed.view(torch.int64),
        packed.stride(0),
        chains,
        last,
        base,
        temperature,
        seeds,
        row_slots,
        row_bases,
        tallies,
        tally,
        rows,
        DRAFTS=num_drafts,
        RING=chains.shape[1],
        BLOCK=triton.next_power_of_2(row_slots.shape[0]),
    )


def settle_reference(
    packed: torch.Tensor,
    chains: torch.Tensor,
    last: torch.Tensor,
    base: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    row_slots: torch.Tensor,
    row_bases: torch.Tensor,
    tallies: torch.Tensor,
    tally: int,
    num_drafts: int,
) -> None:
    """`settle` in plain torch."""
    rows, ring = packed.shape[0], chains.shape[1]
    valid = packed[:, 3] > 0
    row_slots[:rows] = torch.where(valid, packed[:, MARK].abs() - 1, -1).to(torch.int32)
    row_bases[:rows] = torch.where(valid, packed[:, 2], 1)
    kept = torch.nonzero(valid).flatten()
    slots, positions, tokens = row_slots[kept].long(), packed[kept, 2].long(), packed[kept, 1].long()
    ahead = (last[slots] - base[slots] - num_drafts).clamp(min=0)
    alive = (packed[kept, MARK] > 0) & (last[slots] >= positions) & (chains[slots, positions % ring] == tokens)
    chains[slots, positions % ring] = tokens
    chains[slots, (positions - 1) % ring] = packed[kept, 0].long()
    last[slots] = torch.where(alive, last[slots], positions.to(torch.int32))
    base[slots] = positions.to(torch.int32)
    temperature[slots] = packed.view(torch.float32)[kept, 4]
    seeds[slots] = packed.view(torch.int64)[kept, 3]
    missed = (ahead > 0) & ~alive
    tallies[tally, :3] = torch.stack([((ahead > 0) & alive).sum(), missed.sum(), ahead[missed].sum()])


@triton.jit
def _inputs_kernel(
    pack,
    stride,
    chains,
    last,
    row_slots,
    row_bases,
    ids,
    positions,
    slots,
    seq_lens,
    draw_slots,
    columns,
    vocab_size,
    DRAFTS: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_LEN: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(row_slots + row)
    known = slot >= 0
    end = tl.load(last + slot, mask=known, other=1)
    going = known & (end < tl.load(row_bases + row) + 2 * DRAFTS + 1)
    newest = tl.where(going, end, 1)
    for index in tl.static_range(WIDTH):
        position = newest - (WIDTH - 1 - index)
        inside = going & (position < MAX_LEN)
        token = tl.load(chains + slot * RING + position % RING, mask=going, other=0)
        at = row * WIDTH + index
        tl.store(ids + at, tl.minimum(tl.maximum(token, 0), vocab_size - 1).to(tl.int32))
        tl.store(positions + at, tl.minimum(position, MAX_LEN - 1).to(tl.int64))
        tl.store(slots + at, slot_at(pack + row.to(tl.int64) * stride, position, inside, BLOCK_SIZE))
    tl.store(seq_lens + row, tl.minimum(newest + 1, MAX_LEN))
    tl.store(draw_slots + row, tl.where(going, slot, -1))
    tl.store(columns + row, ((newest + 1) % RING).to(tl.int64))


def chain_inputs(
    packed: torch.Tensor,
    chains: torch.Tensor,
    last: torch.Tensor,
    row_slots: torch.Tensor,
    row_bases: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    draw_slots: torch.Tensor,
    columns: torch.Tensor,
    vocab_size: int,
    num_drafts: int,
    width: int,
    block_size: int,
    max_len: int,
) -> None:
    """Inputs of one step: the last `width` tokens, 1 or 2, of each row's chain. Chains that are as long as of use stand still.

    The first step of a job takes two, since the drafter's cache may lack the last two positions of the context.
    Fills ids int32 [width n], positions int64 [width n], slots int64 [width n] (PAD_SLOT where nothing may be written), seq_lens int32 [n],
    draw_slots int32 [>= n] (-1 where the chain stands still), and columns int64 [>= n], where the next token goes.
    """
    _inputs_kernel[(packed.shape[0],)](
        packed,
        packed.stride(0),
        chains,
        last,
        row_slots,
        row_bases,
        ids,
        positions,
        slots,
        seq_lens,
        draw_slots,
        columns,
        vocab_size,
        DRAFTS=num_drafts,
        RING=chains.shape[1],
        WIDTH=width,
        BLOCK_SIZE=block_size,
        MAX_LEN=max_len,
    )


def chain_inputs_reference(
    packed: torch.Tensor,
    chains: torch.Tensor,
    last: torch.Tensor,
    row_slots: torch.Tensor,
    row_bases: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    draw_slots: torch.Tensor,
    columns: torch.Tensor,
    vocab_size: int,
    num_drafts: int,
    width: int,
    block_size: int,
    max_len: int,
) -> None:
    """`chain_inputs` in plain torch."""
    rows, ring = packed.shape[0], chains.shape[1]
    slot = row_slots[:rows].long()
    end = torch.where(slot >= 0, last[slot], 1)
    going = (slot >= 0) & (end < row_bases[:rows] + 2 * num_drafts + 1)
    newest = torch.where(going, end, 1).long()
    places = newest[:, None] - torch.arange(width - 1, -1, -1, device=packed.device)
    tokens = torch.where(going[:, None], chains[slot[:, None], places % ring], 0)
    ids.copy_(tokens.clamp(0, vocab_size - 1).flatten())
    positions.copy_(places.clamp(max=max_len - 1).flatten())
    slots.copy_(slots_of(packed, places, going[:, None], block_size, max_len).flatten())
    seq_lens.copy_((newest + 1).clamp(max=max_len))
    draw_slots[:rows] = torch.where(going, slot, -1).to(torch.int32)
    columns[:rows] = (newest + 1) % ring


@triton.jit
def _extend_kernel(chains, last, draw_slots, tokens, RING: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(draw_slots + row)
    going = slot >= 0
    place = tl.load(last + slot, mask=going, other=0) + 1
    tl.store(chains + slot * RING + place % RING, tl.load(tokens + row), mask=going)
    tl.store(last + slot, place, mask=going)


def extend(chains: torch.Tensor, last: torch.Tensor, draw_slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Put the tokens of a step, int64 [n], at the ends of the chains that go on."""
    _extend_kernel[(tokens.shape[0],)](chains, last, draw_slots, tokens, RING=chains.shape[1])


def extend_reference(chains: torch.Tensor, last: torch.Tensor, draw_slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """`extend` in plain torch."""
    going = torch.nonzero(draw_slots[: tokens.shape[0]] >= 0).flatten()
    slots = draw_slots[going].long()
    places = last[slots] + 1
    chains[slots, places.long() % chains.shape[1]] = tokens[going]
    last[slots] = places
