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
def _halved(at, live, HEAD: tl.constexpr, GIVEN: tl.constexpr):
    """Both halves of what lies at the pointers `at` [n, 1], or at one, float32 [n, HEAD / 2] each; ones if nothing is given."""
    half: tl.constexpr = HEAD // 2
    column = tl.arange(0, half)[None, :]
    left = tl.full([1, 1], 1.0, tl.float32)
    right = left
    if GIVEN:
        left = tl.load(at + column, mask=live, other=0.0).to(tl.float32)
        right = tl.load(at + half + column, mask=live, other=0.0).to(tl.float32)
    return left, right


@triton.jit
def _turned(left, right, gains, angles, eps, dtype: tl.constexpr, HEAD: tl.constexpr, TURNED: tl.constexpr, NORMED: tl.constexpr):
    """Heads in halves, float32 [n, HEAD / 2] each, normed and turned, in the type of the model."""
    if NORMED:
        fade = tl.rsqrt((tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / HEAD + eps)[:, None]
        left_gains, right_gains = gains
        left = (left * fade * left_gains).to(dtype).to(tl.float32)
        right = (right * fade * right_gains).to(dtype).to(tl.float32)
    if TURNED:
        cosine, sine = angles
        left, right = left * cosine - right * sine, right * cosine + left * sine
    return left.to(dtype), right.to(dtype)


@triton.jit
def _row(values, rows, number: tl.constexpr):
    """One row of values [n, m], float32 [1, m]."""
    return tl.sum(tl.where((rows == number)[:, None], values.to(tl.float32), 0.0), axis=0)[None, :]


@triton.jit
def _block(cache, table, start, end, cache_block_stride, cache_token_stride, HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of a head in halves, and its values, from one position on, [BLOCK, HEAD] together, zero from another on."""
    half: tl.constexpr = HEAD // 2
    place = start + tl.arange(0, BLOCK)
    inside = place < end
    block = tl.load(table + place // PAGE, mask=inside, other=0).to(tl.int64)
    at = cache + (block * cache_block_stride + (place % PAGE) * cache_token_stride)[:, None]
    column = tl.arange(0, half)[None, :]
    left = tl.load(at + column, mask=inside[:, None], other=0.0)
    right = tl.load(at + half + column, mask=inside[:, None], other=0.0)
    return left, right, tl.load(at + HEAD + tl.arange(0, HEAD)[None, :], mask=inside[:, None], other=0.0)


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
        my_cache = cache + head * cache_head_stride
        my_table = table + request.to(tl.int64) * table_stride
        length = tl.cdiv(tl.cdiv(past, parts), BLOCK) * BLOCK
        begin = part * length
        end = tl.minimum(begin + length, past)
        # All that is read up to the wait was there before the kernels that this one may overlap with; the old KV too.
        left_keys, right_keys, values = _block(my_cache, my_table, begin, end, cache_block_stride, cache_token_stride, HEAD, PAGE, BLOCK)
        turning = _halved(angles + tl.load(positions + first + token, mask=live, other=0)[:, None] * HEAD, live[:, None], HEAD, TURNED)
        new_turning = _halved(angles + tl.load(positions + first + new)[:, None] * HEAD, True, HEAD, TURNED)
        gains = _halved(query_norm, True, HEAD, NORMED)
        new_gains = _halved(key_norm, True, HEAD, NORMED)
        slot = tl.load(slots + first + new)[:, None]
        if CHAINED:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        # All are read before one is used, so that this takes as long as one read.
        query_at = query + ((first + token) * query_stride + query_head * HEAD)[:, None]
        left, right = _halved(query_at, live[:, None], HEAD, True)
        new_at = (first + new)[:, None]
        new_left, new_right = _halved(key + new_at * key_stride + head * HEAD, True, HEAD, True)
        new_values = tl.load(value + new_at * value_stride + head * HEAD + column[None, :])
        left, right = _turned(left, right, gains, turning, eps, cache.dtype.element_ty, HEAD, TURNED, NORMED)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, HEAD], tl.float32)

        if part == 0:
            left_key, right_key = _turned(new_left, new_right, new_gains, new_turning, eps, cache.dtype.element_ty, HEAD, TURNED, NORMED)
            written = my_cache + (slot // PAGE) * cache_block_stride + (slot % PAGE) * cache_token_stride
            half = tl.arange(0, HEAD // 2)[None, :]
            tl.store(written + half, left_key, mask=slot >= 0)
            tl.store(written + HEAD // 2 + half, right_key, mask=slot >= 0)
            tl.store(written + HEAD + column[None, :], new_values, mask=slot >= 0)
            # One token after the other: Triton makes a matrix product of the sum over them, which is wrong with fewer than its columns.
            for number in tl.static_range(QUERIES):
                scores = tl.sum(left.to(tl.float32) * _row(left_key, new, number), axis=1)
                scores = (scores + tl.sum(right.to(tl.float32) * _row(right_key, new, number), axis=1)) * scale
                # Every row sees the first new token, so that its maximum is finite from here on.
                scores = tl.where((token >= number) | (number == 0), scores, float("-inf"))
                higher = tl.maximum(top, scores)
                faded = tl.exp2(top - higher)
                weights = tl.exp2(scores - higher)
                total = total * faded + weights
                sums = sums * faded[:, None] + weights[:, None] * _row(new_values, new, number)
                top = higher

        for start in tl.range(begin, end, BLOCK, num_stages=1):
            inside = start + tl.arange(0, BLOCK) < end
            scores = tl.dot(right, tl.trans(right_keys), tl.dot(left, tl.trans(left_keys))) * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            faded = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * faded + tl.sum(weights, axis=1)
            sums = sums * faded[:, None] + tl.dot(weights.to(values.dtype), values)
            top = higher
            left_keys, right_keys, values = _block(
                my_cache, my_table, start + BLOCK, end, cache_block_stride, cache_token_stride, HEAD, PAGE, BLOCK
            )

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
