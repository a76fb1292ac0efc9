"""Attention of a draft step in one kernel: it writes the KV of the step's tokens and attends to them and to all before them.

A draft step has one or two new tokens a request. General kernels write the cache, spread the work and combine its parts in launches of
their own, which in a small model takes longer than reading the KV. Here each program takes one request, one KV head and one part of the
context; the part that ends last combines them (the online softmax of FlashAttention, arXiv 2205.14135, and the split of FlashDecoding).
With a `Turn` it also does what precedes attention in a layer: the norm of queries and keys and their rotation (RoPE, arXiv 2104.09864).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turning(angles, position_at, live, norm, HEAD: tl.constexpr, TURNED: tl.constexpr, NORMED: tl.constexpr):
    """Cosines and sines of the positions at the pointers [n, 1], [n, HEAD]; the norm's weights and the opposite half's, [1, HEAD]."""
    half: tl.constexpr = HEAD // 2
    column = tl.arange(0, HEAD)[None, :]
    cosine = tl.full([1, 1], 1.0, tl.float32)
    sine = tl.full([1, 1], 0.0, tl.float32)
    gain = tl.full([1, 1], 1.0, tl.float32)
    opposite_gain = tl.full([1, 1], 1.0, tl.float32)
    if TURNED:
        at = angles + tl.load(position_at, mask=live, other=0) * HEAD + column % half
        cosine = tl.load(at, mask=live, other=0.0).to(tl.float32)
        sine = tl.load(at + half, mask=live, other=0.0).to(tl.float32)
        sine = tl.where(column < half, -sine, sine)
    if NORMED:
        gain = tl.load(norm + column).to(tl.float32)
        opposite_gain = tl.load(norm + (column ^ half)).to(tl.float32)
    return cosine, sine, gain, opposite_gain


@triton.jit
def _halves(at, live, HEAD: tl.constexpr, TURNED: tl.constexpr):
    """Heads at the pointers `at` [n, 1], [n, HEAD], and with their halves exchanged if they are to be turned."""
    column = tl.arange(0, HEAD)[None, :]
    values = tl.load(at + column, mask=live, other=0.0)
    opposite = values
    if TURNED:
        opposite = tl.load(at + (column ^ (HEAD // 2)), mask=live, other=0.0)
    return values, opposite


@triton.jit
def _turned(values, opposite, turning, eps, HEAD: tl.constexpr, TURNED: tl.constexpr, NORMED: tl.constexpr):
    """Heads [n, HEAD] in their own type, normed and turned."""
    made = values
    if TURNED:
        cosine, sine, gain, opposite_gain = turning
        mine, others = values.to(tl.float32), opposite.to(tl.float32)
        if NORMED:
            fade = tl.rsqrt(tl.sum(mine * mine, axis=1) / HEAD + eps)[:, None]
            mine = (mine * fade * gain).to(values.dtype).to(tl.float32)
            others = (others * fade * opposite_gain).to(values.dtype).to(tl.float32)
        made = (mine * cosine + others * sine).to(values.dtype)
    return made


@triton.jit
def _block(cache, table, start, end, cache_block_stride, cache_token_stride, HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values of a head from one position on, [BLOCK, HEAD] each, zero from another on."""
    place = start + tl.arange(0, BLOCK)
    inside = place < end
    block = tl.load(table + place // PAGE, mask=inside, other=0).to(tl.int64)
    at = cache + (block * cache_block_stride + (place % PAGE) * cache_token_stride)[:, None] + tl.arange(0, HEAD)[None, :]
    return tl.load(at, mask=inside[:, None], other=0.0), tl.load(at + HEAD, mask=inside[:, None], other=0.0)


@triton.jit
def decode_kernel(
    query,
    key,
    value,
    cache,
    output,
    table,
    seq_lens,
    slots,
    part_sums,
    part_stats,
    arrived,
    positions,
    angles,
    query_norm,
    key_norm,
    scale,
    eps,
    query_stride,
    key_stride,
    value_stride,
    output_stride,
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    table_stride,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LIVE: tl.constexpr,
    PARTS: tl.constexpr,
    SHORTEST: tl.constexpr,
    TURNED: tl.constexpr,
    NORMED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One part of the context of one request and KV head: see `decode`, `Heads` and `Scratch`."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    past = tl.maximum(tl.load(seq_lens + request) - QUERIES, 0)
    parts = tl.minimum(tl.maximum(tl.cdiv(past, SHORTEST), 1), PARTS)
    if part < parts:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, HEAD)
        token = row // GROUP
        live = token < QUERIES
        query_head = head * GROUP + row % GROUP
        first = request.to(tl.int64) * QUERIES
        new = tl.arange(0, QUERIES)
        is_new = (new < QUERIES)[:, None]
        my_cache = cache + head * cache_head_stride
        my_table = table + request.to(tl.int64) * table_stride
        length = tl.cdiv(tl.cdiv(past, parts), BLOCK) * BLOCK
        begin = part * length
        end = tl.minimum(begin + length, past)
        # All that is read up to the wait was there before the kernels that this one may overlap with; the old KV too.
        keys, values = _block(my_cache, my_table, begin, end, cache_block_stride, cache_token_stride, HEAD, PAGE, BLOCK)
        turning = _turning(angles, positions + (first + token)[:, None], live[:, None], query_norm, HEAD, TURNED, NORMED)
        new_turning = _turning(angles, positions + (first + new)[:, None], is_new, key_norm, HEAD, TURNED, NORMED)
        slot = tl.load(slots + first + new)[:, None]
        if CHAINED:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        # All are read before one is used, so that this takes as long as one read.
        query_at = query + ((first + token) * query_stride + query_head * HEAD)[:, None]
        queries, opposite = _halves(query_at, live[:, None], HEAD, TURNED)
        new_at = (first + new)[:, None]
        new_keys, new_opposite = _halves(key + new_at * key_stride + head * HEAD, is_new, HEAD, TURNED)
        new_values = tl.load(value + new_at * value_stride + head * HEAD + column[None, :])
        queries = _turned(queries, opposite, turning, eps, HEAD, TURNED, NORMED)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, HEAD], tl.float32)

        if part == 0:
            new_keys = _turned(new_keys, new_opposite, new_turning, eps, HEAD, TURNED, NORMED)
            written = my_cache + (slot // PAGE) * cache_block_stride + (slot % PAGE) * cache_token_stride + column[None, :]
            tl.store(written, new_keys, mask=slot >= 0)
            tl.store(written + HEAD, new_values, mask=slot >= 0)
            scores = tl.sum(queries.to(tl.float32)[:, None, :] * new_keys.to(tl.float32)[None, :, :], axis=2) * scale
            # Every row sees the first new token, so that its maximum is finite from here on.
            scores = tl.where((token[:, None] >= new[None, :]) | (new == 0)[None, :], scores, float("-inf"))
            top = tl.max(scores, axis=1)
            weights = tl.exp2(scores - top[:, None])
            total = tl.sum(weights, axis=1)
            sums = tl.sum(weights[:, :, None] * new_values.to(tl.float32)[None, :, :], axis=1)

        for start in tl.range(begin, end, BLOCK, num_stages=1):
            inside = start + tl.arange(0, BLOCK) < end
            scores = tl.dot(queries, tl.trans(keys)) * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            faded = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * faded + tl.sum(weights, axis=1)
            sums = sums * faded[:, None] + tl.dot(weights.to(values.dtype), values)
            top = higher
            keys, values = _block(my_cache, my_table, start + BLOCK, end, cache_block_stride, cache_token_stride, HEAD, PAGE, BLOCK)

        output_at = output + (first + token)[:, None] * output_stride + query_head[:, None] * HEAD + column[None, :]
        if parts == 1:
            tl.store(output_at, (sums / total[:, None]).to(output.dtype.element_ty), mask=live[:, None])
        else:
            pair = request * tl.num_programs(1) + head
            mine = (pair * PARTS + part).to(tl.int64) * LIVE
            tl.store(part_sums + (mine + row)[:, None] * HEAD + column[None, :], sums, mask=live[:, None])
            tl.store(part_stats + 2 * (mine + row), top, mask=live)
            tl.store(part_stats + 2 * (mine + row) + 1, total, mask=live)
            # All threads have stored before one of them tells.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + pair, 1, sem="acq_rel")
            if before == parts - 1:
                # All parts at once, since each read takes as long as all.
                kept = tl.arange(0, LIVE)
                other = tl.arange(0, PARTS)
                theirs = (pair * PARTS + other).to(tl.int64)[:, None] * LIVE + kept[None, :]
                some = (other < parts)[:, None] & (kept < QUERIES * GROUP)[None, :]
                tops = tl.load(part_stats + 2 * theirs, mask=some, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(part_stats + 2 * theirs + 1, mask=some, other=0.0, cache_modifier=".cg")
                sums_at = part_sums + theirs[:, :, None] * HEAD + column[None, None, :]
                their_sums = tl.load(sums_at, mask=some[:, :, None], other=0.0, cache_modifier=".cg")
                # The first part has the new tokens, so its maximum is finite.
                weights = tl.where(some, tl.exp2(tops - tl.max(tops, axis=0)[None, :]), 0.0)
                whole = tl.sum(their_sums * weights[:, :, None], axis=0) / tl.sum(totals * weights, axis=0)[:, None]
                kept_at = output + (first + kept // GROUP)[:, None] * output_stride + (head * GROUP + kept % GROUP)[:, None] * HEAD
                tl.store(kept_at + column[None, :], whole.to(output.dtype.element_ty), mask=(kept < QUERIES * GROUP)[:, None])
                tl.store(arrived + pair, 0)
