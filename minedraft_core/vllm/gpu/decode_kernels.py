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
def _fetch(cache, table, start, end, cache_block_stride, cache_token_stride, HEAD: tl.constexpr, PAGE: tl.constexpr):
    """Bring the KV of a head from one position to another into the L2 cache, a sector of 32 bytes at a time."""
    size: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth // 8
    sectors: tl.constexpr = 2 * HEAD * size // 32
    each = tl.arange(0, 128 * sectors)
    for begin in range(start, end, 128):
        at = tl.minimum(begin + each // sectors, end - 1)
        token = tl.load(table + at // PAGE).to(tl.int64) * cache_block_stride + (at % PAGE) * cache_token_stride
        fetched = [cache + token + each % sectors * (32 // size)]
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", fetched, dtype=tl.int32, is_pure=False, pack=1)


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
def _turned(at, live, turning, eps, HEAD: tl.constexpr, TURNED: tl.constexpr, NORMED: tl.constexpr):
    """Heads at the pointers `at` [n, 1], [n, HEAD] in their own type, normed and turned."""
    column = tl.arange(0, HEAD)[None, :]
    values = tl.load(at + column, mask=live, other=0.0)
    if TURNED:
        cosine, sine, gain, opposite_gain = turning
        mine, others = values.to(tl.float32), tl.load(at + (column ^ (HEAD // 2)), mask=live, other=0.0).to(tl.float32)
        if NORMED:
            fade = tl.rsqrt(tl.sum(mine * mine, axis=1) / HEAD + eps)[:, None]
            mine = (mine * fade * gain).to(values.dtype).to(tl.float32)
            others = (others * fade * opposite_gain).to(values.dtype).to(tl.float32)
        values = (mine * cosine + others * sine).to(values.dtype)
    return values


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
        one = tl.zeros([1, 1], tl.int64)
        my_cache = cache + head * cache_head_stride
        my_table = table + request.to(tl.int64) * table_stride
        length = tl.cdiv(tl.cdiv(past, parts), BLOCK) * BLOCK
        end = tl.minimum((part + 1) * length, past)
        turning = _turning(angles, positions + (first + token)[:, None], live[:, None], query_norm, HEAD, TURNED, NORMED)
        if CHAINED:
            # All that is read up to here was there before the predecessors of this kernel that it may overlap with; the old KV too.
            _fetch(my_cache, my_table, part * length, end, cache_block_stride, cache_token_stride, HEAD, PAGE)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        query_at = query + ((first + token) * query_stride + query_head * HEAD)[:, None]
        queries = _turned(query_at, live[:, None], turning, eps, HEAD, TURNED, NORMED)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, HEAD], tl.float32)

        if part == 0:
            for new in tl.static_range(QUERIES):
                key_turning = _turning(angles, positions + (first + new) + one, one == 0, key_norm, HEAD, TURNED, NORMED)
                key_at = key + (first + new) * key_stride + head * HEAD + one
                keys = tl.reshape(_turned(key_at, one == 0, key_turning, eps, HEAD, TURNED, NORMED), [HEAD])
                values = tl.load(value + (first + new) * value_stride + head * HEAD + column)
                slot = tl.load(slots + first + new)
                if slot >= 0:
                    written = my_cache + (slot // PAGE) * cache_block_stride + (slot % PAGE) * cache_token_stride
                    tl.store(written + column, keys)
                    tl.store(written + HEAD + column, values)
                score = tl.sum(queries.to(tl.float32) * keys.to(tl.float32)[None, :], axis=1) * scale
                # Every row sees the first new token, so that its maximum is finite from here on.
                score = tl.where(token >= new, score, float("-inf")) if new > 0 else score
                higher = tl.maximum(top, score)
                faded = tl.exp2(top - higher)
                weight = tl.exp2(score - higher)
                total = total * faded + weight
                sums = sums * faded[:, None] + weight[:, None] * values.to(tl.float32)[None, :]
                top = higher

        for start in range(part * length, end, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < end
            block = tl.load(my_table + place // PAGE, mask=inside, other=0).to(tl.int64)
            base = block * cache_block_stride + (place % PAGE) * cache_token_stride
            keys = tl.load(my_cache + base[None, :] + column[:, None], mask=inside[None, :], other=0.0)
            values = tl.load(my_cache + base[:, None] + HEAD + column[None, :], mask=inside[:, None], other=0.0)
            scores = tl.dot(queries, keys) * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            faded = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * faded + tl.sum(weights, axis=1)
            sums = sums * faded[:, None] + tl.dot(weights.to(values.dtype), values)
            top = higher

        output_at = output + (first + token)[:, None] * output_stride + query_head[:, None] * HEAD + column[None, :]
        if parts == 1:
            tl.store(output_at, (sums / total[:, None]).to(output.dtype.element_ty), mask=live[:, None])
        else:
            pair = request * tl.num_programs(1) + head
            mine = (pair * PARTS + part).to(tl.int64) * ROWS
            tl.store(part_sums + (mine + row)[:, None] * HEAD + column[None, :], sums)
            tl.store(part_stats + 2 * (mine + row), top)
            tl.store(part_stats + 2 * (mine + row) + 1, total)
            # All threads have stored before one of them tells.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + pair, 1, sem="acq_rel")
            if before == parts - 1:
                top = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                sums = tl.zeros([ROWS, HEAD], tl.float32)
                # The first part has the new tokens, so its maximum is finite.
                for other in range(parts):
                    theirs = (pair * PARTS + other).to(tl.int64) * ROWS
                    their_top = tl.load(part_stats + 2 * (theirs + row), cache_modifier=".cg")
                    their_total = tl.load(part_stats + 2 * (theirs + row) + 1, cache_modifier=".cg")
                    their_sums = tl.load(part_sums + (theirs + row)[:, None] * HEAD + column[None, :], cache_modifier=".cg")
                    higher = tl.maximum(top, their_top)
                    faded = tl.exp2(top - higher)
                    weight = tl.exp2(their_top - higher)
                    total = total * faded + their_total * weight
                    sums = sums * faded[:, None] + their_sums * weight[:, None]
                    top = higher
                tl.store(output_at, (sums / total[:, None]).to(output.dtype.element_ty), mask=live[:, None])
                tl.store(arrived + pair, 0)
