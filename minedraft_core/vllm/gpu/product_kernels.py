"""Products of a few rows with the weights of a layer, in one kernel with what surrounds them.

With a few rows a product takes as long as reading its weights, and a layer of small kernels about as long again as its launches. So the
gate, the sum with the residual stream, the norm before the next product, bias and scales are done by the product's kernel. A norm is cut
in two: who writes the stream also writes it times the norm's weights, and sums of squares by blocks; the product, which is linear, is
divided by their root. Nothing is then done to rows while weights stream by. A kernel that is `chained` starts as soon as its predecessor
has its rows (programmatic dependent launch) and waits for that one's end.

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
def _gathered(part_sums, block, cell, PARTS: tl.constexpr, GATED: tl.constexpr):
    """What all parts of a block have stored, added in their order."""
    size: tl.constexpr = cell.shape[0] * cell.shape[1]
    sums = tl.zeros(cell.shape, tl.float32)
    ups = tl.zeros(cell.shape, tl.float32)
    for part in range(PARTS):
        theirs = (block * PARTS + part).to(tl.int64)
        sums += tl.load(part_sums + 2 * theirs * size + cell, cache_modifier=".cg")
        if GATED:
            ups += tl.load(part_sums + (2 * theirs + 1) * size + cell, cache_modifier=".cg")
    return sums, ups


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
def _by_block(squares, row, live, num_blocks, BLOCKS: tl.constexpr, GIVEN: tl.constexpr):
    """Sums of squares of the rows, float32 [blocks, rows]; nothing if none are given."""
    found = tl.zeros([1, 1], tl.float32)
    if GIVEN:
        number = tl.arange(0, BLOCKS)[:, None]
        there = (number < num_blocks) & live[None, :]
        found = tl.load(squares + number * row.shape[0] + row[None, :], mask=there, other=0.0)
    return found


@triton.jit
def _finished(sums, ups, fade, scale, up_scale, bias, up_bias, NORMED, GATED, BIASED, SCALED):
    """What a product is made into before it is added to anything."""
    if SCALED:
        sums *= scale
        ups *= up_scale
    if NORMED:
        sums *= fade
        ups *= fade
    if BIASED:
        sums += bias
        ups += up_bias
    if GATED:
        sums = sums * tl.sigmoid(sums) * ups
    return sums


@triton.jit
def _weighted(stream, gains):
    """A stream times a norm's weights, in its own type.

    It is divided by its norm only after a product. Until then it may be larger than float16: it is cut there, and drafts get worse.
    """
    weighted = stream.to(tl.float32) * gains
    if stream.dtype == tl.float16:
        weighted = tl.clamp(weighted, -65504.0, 65504.0)
    return weighted.to(stream.dtype)


@triton.jit
def feed_kernel(stream, norm, fed, squares, width, BLOCK: tl.constexpr):
    """One row of a stream that no product has written: see `Products.feed`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < width
    values = tl.load(stream + row * width + column, mask=there, other=0.0)
    gains = tl.load(norm + column, mask=there, other=0.0).to(tl.float32)
    tl.store(fed + row * width + column, _weighted(values, gains), mask=there)
    values = values.to(tl.float32)
    tl.store(squares + row, tl.sum(values * values))


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def product_kernel(
    rows,
    weight,
    scales,
    bias,
    squares,
    output,
    norm,
    fed,
    fed_squares,
    part_sums,
    arrived,
    num_rows,
    width_in,
    width_out,
    row_stride,
    num_blocks,
    eps,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    FEEDING: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One block of outputs, of one part of the depth: see `Products.multiply`, `Products.add`, `Tile` and `Workspace`."""
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
    row_at = rows + row[None, :, None] * row_stride + column
    weight_at = weight + out.to(tl.int64)[None, :, None] * width_in + column
    live_rows, real_outputs = live[None, :, None], inside[None, :, None]
    # All that ends a product is there before the rows are: a residual stream has been written by a kernel before the last one.
    scale, up_scale = _of_outputs(scales, out, width_out, inside, SCALED, GATED)
    biases, up_biases = _of_outputs(bias, out, width_out, inside, BIASED, GATED)
    gains, _ = _of_outputs(norm, out, width_out, inside, FEEDING, False)
    cells = row.to(tl.int64)[None, :] * width_out + out[:, None]
    kept = live[None, :] & inside[:, None]
    stream = tl.zeros([1, 1], tl.float32)
    if ADDED:
        # Past the L1 cache, which may not have heard of another multiprocessor's writing before the wait.
        stream = tl.load(output + cells, mask=kept, other=0.0, cache_modifier=".cg").to(tl.float32)
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        # Not before: the next kernel reads what the one before this one has written.
        tl.extra.cuda.gdc_launch_dependents()
    # With many rows the squares would take the registers of the sums.
    by_block = _by_block(squares, row, live, num_blocks, BLOCKS, NORMED and ROWS <= 16)
    sums = tl.zeros([SLICES, OUTPUTS, ROWS], tl.float32)
    ups = tl.zeros([SLICES, OUTPUTS, ROWS], tl.float32)
    # All programs read the same rows. They begin at different columns, so that they do not all read the same ones at once.
    begin = first + block % tl.maximum((last - first) // step, 1) * step
    for done in range(0, last - first, step):
        at = begin + done
        at = tl.where(at < last, at, at - (last - first))
        values = tl.trans(tl.load(row_at + at, mask=live_rows, other=0.0), 0, 2, 1)
        sums = tl.dot(_wide(tl.load(weight_at + at, mask=real_outputs, other=0.0), values.dtype), values, sums)
        if GATED:
            ups = tl.dot(_wide(tl.load(weight_at + up + at, mask=real_outputs, other=0.0), values.dtype), values, ups)
    sums, ups = tl.sum(sums, axis=0), tl.sum(ups, axis=0)
    if ROWS > 16:
        by_block = _by_block(squares, row, live, num_blocks, BLOCKS, NORMED)

    whole = True
    if PARTS > 1:
        cell = tl.arange(0, OUTPUTS)[:, None] * ROWS + row[None, :]
        size: tl.constexpr = ROWS * OUTPUTS
        mine = (block * PARTS + part).to(tl.int64)
        tl.store(part_sums + 2 * mine * size + cell, sums)
        if GATED:
            tl.store(part_sums + (2 * mine + 1) * size + cell, ups)
        # All threads have stored before one of them tells.
        tl.debug_barrier()
        whole = tl.atomic_add(arrived + block, 1, sem="acq_rel") == PARTS - 1
        if whole:
            sums, ups = _gathered(part_sums, block, cell, PARTS, GATED)
            tl.store(arrived + block, 0)
    if whole:
        fade = tl.rsqrt(tl.sum(by_block, axis=0) / width_in + eps)[None, :]
        made = _finished(sums, ups, fade, scale, up_scale, biases, up_biases, NORMED, GATED, BIASED, SCALED)
        if ADDED:
            made += stream
        stored = made.to(output.dtype.element_ty)
        tl.store(output + cells, stored, mask=kept)
        if FEEDING:
            tl.store(fed + cells, _weighted(stored, gains), mask=kept)
            made = stored.to(tl.float32)
            tl.store(fed_squares + block * ROWS + row, tl.sum(made * made, axis=0))
