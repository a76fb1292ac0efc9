"""Products of a few rows with the weights of a layer, in one kernel with what surrounds them.

With a few rows a product takes as long as reading its weights, and a layer of small kernels about as long again as its launches. So the
norm before a product, and the gate, the sum with the residual stream, bias and scales after it, are done by the product's kernel. A
kernel that is `chained` starts before its predecessor ends (programmatic dependent launch), and meanwhile fetches its weights into the
L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fetch_line(at):
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _fetch(weight, out, width_in, width_out, first, last, DEPTH: tl.constexpr, GATED: tl.constexpr, LINE: tl.constexpr):
    """Bring a program's weights into the L2 cache."""
    line = tl.arange(0, (DEPTH + LINE - 1) // LINE)[None, :] * LINE
    # Rows past the end are somebody else's memory or none, so the last one is fetched again.
    row = weight + tl.minimum(out, width_out - 1).to(tl.int64)[:, None] * width_in + line
    for at in range(first, last, DEPTH):
        _fetch_line(row + at)
        if GATED:
            _fetch_line(row + width_out.to(tl.int64) * width_in + at)


@triton.jit
def _gathered(part_sums, part_squares, block, row, cell, PARTS: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr):
    """What all parts of a block have stored, added in their order."""
    size: tl.constexpr = cell.shape[0] * cell.shape[1]
    sums = tl.zeros(cell.shape, tl.float32)
    ups = tl.zeros(cell.shape, tl.float32)
    squares = tl.zeros(row.shape, tl.float32)
    for part in range(PARTS):
        theirs = (block * PARTS + part).to(tl.int64)
        sums += tl.load(part_sums + 2 * theirs * size + cell, cache_modifier=".cg")
        if GATED:
            ups += tl.load(part_sums + (2 * theirs + 1) * size + cell, cache_modifier=".cg")
        if NORMED:
            squares += tl.load(part_squares + theirs * row.shape[0] + row, cache_modifier=".cg")
    return sums, ups, squares


@triton.jit
def _finished(sums, ups, squares, scales, bias, out, inside, width_in, width_out, eps, NORMED, GATED, BIASED, SCALED):
    """What a product is made into before it is added to anything, float32 [rows, outputs]."""
    if SCALED:
        sums *= tl.load(scales + out, mask=inside, other=0.0)[None, :]
        if GATED:
            ups *= tl.load(scales + width_out + out, mask=inside, other=0.0)[None, :]
    if NORMED:
        fade = tl.rsqrt(squares / width_in + eps)[:, None]
        sums *= fade
        ups *= fade
    if BIASED:
        sums += tl.load(bias + out, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            ups += tl.load(bias + width_out + out, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        sums = sums * tl.sigmoid(sums) * ups
    return sums


@triton.jit
def product_kernel(
    rows,
    weight,
    scales,
    bias,
    norm,
    residual,
    output,
    part_sums,
    part_squares,
    arrived,
    num_rows,
    width_in,
    width_out,
    row_stride,
    eps,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    CHAINED: tl.constexpr,
    LINE: tl.constexpr,
):
    """One block of outputs, of one part of the depth: see `Products.multiply`, `Tile` and `Workspace`."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    out = block * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, DEPTH)
    live = (row < num_rows)[:, None]
    inside = out < width_out
    each = tl.cdiv(width_in // DEPTH, PARTS)
    first = part * each * DEPTH
    last = tl.minimum(first + each * DEPTH, width_in)
    weight_row = weight + out.to(tl.int64)[:, None] * width_in
    up = width_out.to(tl.int64) * width_in
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        _fetch(weight, out, width_in, width_out, first, last, DEPTH, GATED, LINE)
        tl.extra.cuda.gdc_wait()

    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    ups = tl.zeros([ROWS, OUTPUTS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for at in range(first, last, DEPTH):
        values = tl.load(rows + row[:, None] * row_stride + at + column[None, :], mask=live, other=0.0)
        if NORMED:
            wide = values.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            values = (wide * tl.load(norm + at + column).to(tl.float32)[None, :]).to(values.dtype)
        weights = tl.load(weight_row + at + column[None, :], mask=inside[:, None], other=0.0)
        sums = tl.dot(values, tl.trans(weights.to(values.dtype)), sums)
        if GATED:
            weights = tl.load(weight_row + up + at + column[None, :], mask=inside[:, None], other=0.0)
            ups = tl.dot(values, tl.trans(weights.to(values.dtype)), ups)

    whole = True
    if PARTS > 1:
        cell = row[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        size: tl.constexpr = ROWS * OUTPUTS
        mine = (block * PARTS + part).to(tl.int64)
        tl.store(part_sums + 2 * mine * size + cell, sums)
        if GATED:
            tl.store(part_sums + (2 * mine + 1) * size + cell, ups)
        if NORMED:
            tl.store(part_squares + mine * ROWS + row, squares)
        # All threads have stored before one of them tells.
        tl.debug_barrier()
        whole = tl.atomic_add(arrived + block, 1, sem="acq_rel") == PARTS - 1
        if whole:
            sums, ups, squares = _gathered(part_sums, part_squares, block, row, cell, PARTS, GATED, NORMED)
            tl.store(arrived + block, 0)
    if whole:
        made = _finished(sums, ups, squares, scales, bias, out, inside, width_in, width_out, eps, NORMED, GATED, BIASED, SCALED)
        cells = row.to(tl.int64)[:, None] * width_out + out[None, :]
        kept = live & inside[None, :]
        if ADDED:
            made += tl.load(residual + cells, mask=kept, other=0.0).to(tl.float32)
        tl.store(output + cells, made.to(output.dtype.element_ty), mask=kept)
