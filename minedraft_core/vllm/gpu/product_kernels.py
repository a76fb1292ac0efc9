"""Products of a few rows with the weights of a layer, in one kernel with what surrounds them.

With a few rows a product takes as long as reading its weights, and a layer of small kernels about as long again as its launches. So the
norm before a product, and the gate, the sum with the residual stream, bias and scales after it, are done by the product's kernel. A
kernel that is `chained` starts as soon as its predecessor has its rows (programmatic dependent launch), reads as many of its weights as
fit beside the predecessor's, and then waits for that one's end.

The weights are the left operand: an instruction of the tensor cores takes 16 rows on its left and 8 on its right, about what a batch has.
Each warp multiplies a slice of the depth of its own, so that no warp reads what another reads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _wide(weights, dtype: tl.constexpr):
    """Weights in the type of the rows."""
    if weights.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        # In two steps: the instruction from float16 to bfloat16 has an eighth of their speed.
        weights = weights.to(tl.float16).to(tl.float32)
    return weights.to(dtype)


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
def _of_outputs(pointer, out, width_out, inside, GIVEN: tl.constexpr, GATED: tl.constexpr):
    """What there is of each output, and of the other half where there is one, float32 [outputs, 1]; nothing if none is given."""
    mine = tl.zeros([1, 1], tl.float32)
    theirs = tl.zeros([1, 1], tl.float32)
    if GIVEN:
        mine = tl.load(pointer + out, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            theirs = tl.load(pointer + width_out + out, mask=inside, other=0.0).to(tl.float32)[:, None]
    return mine, theirs


@triton.jit
def _with_columns(sums, ups, squares, values, gains, weights, up_weights, NORMED: tl.constexpr, GATED: tl.constexpr):
    """Sums by slices, float32 [slices, outputs, rows], and the rows' squares [slices, rows], with some columns more."""
    if NORMED:
        wide = values.to(tl.float32)
        squares += tl.sum(wide * wide, axis=2)
        wide *= gains
        if values.dtype == tl.float16:
            # They are divided by their norm only after the product, and until then may be larger than the type.
            wide = tl.clamp(wide, -65504.0, 65504.0)
        values = wide.to(values.dtype)
    values = tl.trans(values, 0, 2, 1)
    sums = tl.dot(_wide(weights, values.dtype), values, sums)
    if GATED:
        ups = tl.dot(_wide(up_weights, values.dtype), values, ups)
    return sums, ups, squares


@triton.jit
def _weights(at, up, inside, GATED: tl.constexpr):
    """Weights at the pointers, and those of the other half where there is one."""
    mine = tl.load(at, mask=inside, other=0.0)
    theirs = mine
    if GATED:
        theirs = tl.load(at + up, mask=inside, other=0.0)
    return mine, theirs


@triton.jit
def _read_early(weight_at, norm, up, inside, first, SLICES: tl.constexpr, DEPTH: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr):
    """Some columns from `first` on, if any are to be read, what the rows are multiplied by there, and the weights of both halves."""
    column = first
    gains = first
    weights = first
    up_weights = first
    if DEPTH:
        column = first + tl.arange(0, SLICES)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
        weights, up_weights = _weights(weight_at + column, up, inside, GATED)
        if NORMED:
            gains = tl.load(norm + column).to(tl.float32)
    return column, gains, weights, up_weights


@triton.jit
def _summed(
    sums,
    ups,
    squares,
    row_at,
    weight_at,
    up,
    live,
    inside,
    norm_at,
    gains,
    first,
    begin,
    last,
    STEP: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Add the columns from `begin` to `last` and from `first` on; see `_with_columns`."""
    for done in range(0, last - first, STEP):
        at = begin + done
        at = tl.where(at < last, at, at - (last - first))
        values = tl.load(row_at + at, mask=live, other=0.0)
        mine, theirs = _weights(weight_at + at, up, inside, GATED)
        sums, ups, squares = _with_columns(sums, ups, squares, values, gains, mine, theirs, NORMED, GATED)
        if NORMED:
            # Too few bytes for an asynchronous copy, so they are asked for a step ahead.
            gains = tl.load(norm_at + tl.where(at + STEP < last, at + STEP, first)).to(tl.float32)
    return sums, ups, squares


@triton.jit
def _finished(sums, ups, squares, scale, up_scale, bias, up_bias, width_in, eps, NORMED, GATED, BIASED, SCALED):
    """What a product is made into before it is added to anything."""
    if SCALED:
        sums *= scale
        ups *= up_scale
    if NORMED:
        fade = tl.rsqrt(squares / width_in + eps)[None, :]
        sums *= fade
        ups *= fade
    if BIASED:
        sums += bias
        ups += up_bias
    if GATED:
        sums = sums * tl.sigmoid(sums) * ups
    return sums


@triton.jit(do_not_specialize=["num_rows"])
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
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One block of outputs, of one part of the depth: see `Products.multiply`, `Tile` and `Workspace`."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    out = block * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, SLICES)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    live = row < num_rows
    inside = out < width_out
    step: tl.constexpr = SLICES * DEPTH
    each = tl.cdiv(width_in // step, PARTS)
    first = part * each * step
    last = tl.minimum(first + each * step, width_in)
    up = width_out.to(tl.int64) * width_in
    row_at = rows + row[None, :, None] * row_stride
    weight_at = weight + out.to(tl.int64)[None, :, None] * width_in
    live_rows, real_outputs = live[None, :, None], inside[None, :, None]
    # Weights and all that ends a product are there before the rows are: a residual stream has been written by a kernel before the last one.
    early_column, early_gains, early, early_up = _read_early(
        weight_at, norm, up, real_outputs, first, SLICES, EARLY * DEPTH, NORMED=NORMED, GATED=GATED
    )
    first += EARLY * step
    # All programs read the same rows. They begin at different columns, so that they do not all read the same ones at once.
    begin = first + block % tl.maximum((last - first) // step, 1) * step
    norm_at = norm + column
    gains = column
    if NORMED:
        # There may be no columns left.
        gains = tl.load(norm_at + tl.minimum(begin, width_in - step)).to(tl.float32)
    scale, up_scale = _of_outputs(scales, out, width_out, inside, SCALED, GATED)
    added, up_added = _of_outputs(bias, out, width_out, inside, BIASED, GATED)
    cells = row.to(tl.int64)[None, :] * width_out + out[:, None]
    kept = live[None, :] & inside[:, None]
    stream = tl.zeros([1, 1], tl.float32)
    if ADDED:
        # Past the L1 cache, which may not have heard of another multiprocessor's writing before the wait.
        stream = tl.load(residual + cells, mask=kept, other=0.0, cache_modifier=".cg").to(tl.float32)
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        # Not before: the next kernel reads what the one before this one has written.
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros([SLICES, OUTPUTS, ROWS], tl.float32)
    ups = tl.zeros([SLICES, OUTPUTS, ROWS], tl.float32)
    none = tl.zeros([SLICES, ROWS], tl.float32)
    early_squares = none
    if EARLY:
        values = tl.load(row_at + early_column, mask=live_rows, other=0.0)
        sums, ups, early_squares = _with_columns(sums, ups, none, values, early_gains, early, early_up, NORMED, GATED)
    row_at += column
    weight_at += column
    sums, ups, squares = _summed(
        sums, ups, none, row_at, weight_at, up, live_rows, real_outputs, norm_at, gains, first, begin, last, step, NORMED, GATED
    )
    sums, ups, squares = tl.sum(sums, axis=0), tl.sum(ups, axis=0), tl.sum(squares, axis=0) + tl.sum(early_squares, axis=0)

    whole = True
    if PARTS > 1:
        cell = tl.arange(0, OUTPUTS)[:, None] * ROWS + row[None, :]
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
        made = _finished(sums, ups, squares, scale, up_scale, added, up_added, width_in, eps, NORMED, GATED, BIASED, SCALED)
        if ADDED:
            made += stream
        tl.store(output + cells, made.to(output.dtype.element_ty), mask=kept)
