"""The small kernels that carry drafts from chains to the target, each beside a reference in plain torch that the tests compare it with.

A draft travels as words of 64 bits, the token below, the job's number plus one above. So the target can look at words while they arrive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKEN_BITS = 32
_BLOCK = 1024


@triton.jit(do_not_specialize=["number"])
def _publish_kernel(words, chains, last, row_slots, row_bases, number, DRAFTS: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    slot = tl.load(row_slots + row)
    known = slot >= 0
    base = tl.load(row_bases + row)
    ready = (slot < 0) | (tl.load(last + slot, mask=known, other=0) >= base + DRAFTS)
    token = tl.load(chains + slot * RING + (base + 1 + index) % RING, mask=index < tl.where(known, DRAFTS, 0), other=0)
    word = ((number + 1).to(tl.int64) << 32) | token
    tl.store(words + row * DRAFTS + index, tl.where(ready, word, 0), mask=index < DRAFTS)


def publish(
    words: torch.Tensor, chains: torch.Tensor, last: torch.Tensor, row_slots: torch.Tensor, row_bases: torch.Tensor, number: int
) -> None:
    """Write the drafts of job `number` as words, int64 [n, k]: the token below, the number plus one above; 0 where a draft is not ready.

    A word is written and read whole. So the target, which reads words while they arrive, takes no token of another job.
    """
    rows, drafts = words.shape
    _publish_kernel[(rows,)](
        words,
        chains,
        last,
        row_slots,
        row_bases,
        number,
        DRAFTS=drafts,
        RING=chains.shape[1],
        BLOCK=triton.next_power_of_2(drafts),
    )


def publish_reference(
    words: torch.Tensor, chains: torch.Tensor, last: torch.Tensor, row_slots: torch.Tensor, row_bases: torch.Tensor, number: int
) -> None:
    """`publish` in plain torch."""
    rows, drafts = words.shape
    slot, base = row_slots[:rows].long(), row_bases[:rows].long()
    ready = (slot < 0) | (last[slot] >= base + drafts)
    places = base[:, None] + 1 + torch.arange(drafts, device=words.device)
    tokens = torch.where(slot[:, None] >= 0, chains[slot[:, None], places % chains.shape[1]], 0)
    words.copy_(torch.where(ready[:, None], ((number + 1) << _TOKEN_BITS) | tokens, 0))


@triton.jit
def _gather_kernel(
    out,
    out_stride,
    kept,
    kept_stride,
    last,
    row_slots,
    row_bases,
    vocab_size,
    DRAFTS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, step = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slots + row)
    if slot >= 0:
        base = tl.load(row_bases + row)
        if tl.load(last + slot) >= base + DRAFTS:
            at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
            inside = at < vocab_size
            source = kept + (slot * RING + (base + 1 + step) % RING).to(tl.int64) * kept_stride
            tl.store(out + (row * DRAFTS + step).to(tl.int64) * out_stride + at, tl.load(source + at, mask=inside), mask=inside)


def gather_logits(out: torch.Tensor, kept: torch.Tensor, last: torch.Tensor, row_slots: torch.Tensor, row_bases: torch.Tensor) -> None:
    """Copy the logits of the drafts that are ready from the chains, kept [slots, ring, vocabulary], to out [n, k, vocabulary]."""
    rows, drafts, vocabulary = out.shape
    _gather_kernel[rows, drafts, triton.cdiv(vocabulary, _BLOCK)](
        out,
        out.stride(1),
        kept,
        kept.stride(1),
        last,
        row_slots,
        row_bases,
        vocabulary,
        DRAFTS=drafts,
        RING=kept.shape[1],
        BLOCK=_BLOCK,
    )


def gather_logits_reference(
    out: torch.Tensor, kept: torch.Tensor, last: torch.Tensor, row_slots: torch.Tensor, row_bases: torch.Tensor
) -> None:
    """`gather_logits` in plain torch."""
    rows, drafts, _ = out.shape
    slot, base = row_slots[:rows].long(), row_bases[:rows].long()
    ready = torch.nonzero((slot >= 0) & (last[slot] >= base + drafts)).flatten()
    places = base[ready][:, None] + 1 + torch.arange(drafts, device=out.device)
    out[ready] = kept[slot[ready][:, None], places % kept.shape[1]]


@triton.jit(do_not_specialize=["number", "count", "patience"])
def _take_kernel(words, tokens, late, number, count, patience, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < count
    wanted = (number + 1).to(tl.int64)
    found = tl.load(words + at, mask=inside, other=0, volatile=True)
    missing = tl.sum((inside & ((found >> 32) != wanted)).to(tl.int32))
    looks = 0
    while (missing > 0) & (looks < patience):
        found = tl.load(words + at, mask=inside, other=0, volatile=True)
        missing = tl.sum((inside & ((found >> 32) != wanted)).to(tl.int32))
        looks += 1
    tl.store(tokens + at, tl.where(missing == 0, found & 0xFFFFFFFF, 0), mask=inside)
    tl.store(late, missing)


def take(words: torch.Tensor, tokens: torch.Tensor, late: torch.Tensor, number: int, patience: int) -> None:
    """Wait on the device until the first n of words, int64 [>= n, k], are those of job `number`, and take their tokens, int64 [n, k].

    After `patience` looks without them the tokens are 0, and `late`, int32 [1], says how many words have not come.
    """
    _take_kernel[(1,)](words, tokens, late, number, tokens.numel(), patience, BLOCK=triton.next_power_of_2(words.numel()))


def take_reference(words: torch.Tensor, tokens: torch.Tensor, late: torch.Tensor, number: int) -> None:
    """`take` in plain torch, of words that do not change."""
    found = words[: tokens.shape[0]]
    came = (found >> _TOKEN_BITS) == number + 1
    tokens.copy_(torch.where(came.all(), found & ((1 << _TOKEN_BITS) - 1), 0))
    late.copy_((~came).sum())


@triton.jit
def _certain_kernel(logits, stride, idx_mapping, late, vocab_size, DRAFTS: tl.constexpr, BLOCK: tl.constexpr):
    if tl.load(late) > 0:
        slot = tl.load(idx_mapping + tl.program_id(0)).to(tl.int64)
        at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        value = tl.where(at == 0, 0.0, float("-inf")).to(logits.dtype.element_ty)
        tl.store(logits + (slot * DRAFTS + tl.program_id(1)) * stride + at, value, mask=at < vocab_size)


def certain_where_late(logits: torch.Tensor, idx_mapping: torch.Tensor, late: torch.Tensor) -> None:
    """Where drafts were late, leave token 0 alone in the logits [slots, k, vocabulary] of a job's requests: it is a draw from them then."""
    _, drafts, vocabulary = logits.shape
    _certain_kernel[idx_mapping.shape[0], drafts, triton.cdiv(vocabulary, _BLOCK)](
        logits, logits.stride(1), idx_mapping, late, vocabulary, DRAFTS=drafts, BLOCK=_BLOCK
    )


def certain_where_late_reference(logits: torch.Tensor, idx_mapping: torch.Tensor, late: torch.Tensor) -> None:
    """`certain_where_late` in plain torch."""
    if int(late) > 0:
        logits[idx_mapping] = float("-inf")
        logits[idx_mapping, :, 0] = 0.0
