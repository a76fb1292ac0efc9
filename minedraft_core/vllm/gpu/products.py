"""Products of a few rows with the weights of a layer, in one kernel with what surrounds them: see `product_kernels`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch
import triton

from minedraft_core.vllm.gpu.product_kernels import feed_kernel, product_kernel

MOST_ROWS = 64
FEW_ROWS = 16  # up to which a product of 16-bit weights takes less time than cuBLAS with what surrounds it
_LEAST_ROWS = 8  # of the right operand on tensor cores
_LEAST_OUTPUTS = 16  # of the left one
_SHALLOWEST = 16  # columns of a slice, likewise
_SHALLOW_BYTES = 128  # of a row of weights at once: less than 32 for each warp are not copied asynchronously
_DEEPEST = 256
_MOST_SUMS = 2048  # of a program: 64 registers of a thread
_MOST_PARTS = 8
_MOST_PROGRAMS = 4  # of a multiprocessor, where small ones are faster than large ones
# Columns at once and stages, the fastest on an H200 for Qwen3-1.7B: by padded rows, and of gated weights by whether they are in 8 bits.
_PLAIN = {8: (256, 6), FEW_ROWS: (512, 4)}
_GATED = {False: (512, 2), True: (256, 3)}
_MOST_STAGES = 6
_SHARED_BYTES = 176 * 1024  # of a multiprocessor for one kernel, so that the next one's programs fit beside it
_PROGRAM_BYTES = 96 * 1024  # likewise, of one program


@dataclass(frozen=True)
class Matrix:
    """Weights of a linear layer: [out, in], contiguous; bias [out] in the rows' type.

    Weights in 8 bits (float8_e4m3fn) have scales, float32 [out], which the products are multiplied by.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @property
    def supported(self) -> bool:
        """Whether the kernel has a shape for it."""
        return self.weight.is_contiguous() and self.weight.shape[1] % _SHALLOWEST == 0


@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv 1910.07467) of the rows before a product: weight [in]."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Fed:
    """Rows that are to be normed: a stream times the norm's weights, [n, in], and what its rows are divided by after a product.

    squares float32 [blocks, padded rows]: the stream's sums of squares by blocks of columns.
    """

    rows: torch.Tensor
    squares: torch.Tensor
    norm: Norm


@dataclass(frozen=True)
class Tile:
    """What one program computes: so many outputs, read so many columns at a time, of one of `parts` of the depth."""

    outputs: int
    depth: int
    parts: int
    stages: int = 4
    warps: int = 4

    @property
    def slices(self) -> int:
        """Into how many the columns are cut, for as many warps."""
        return min(self.warps, self.depth // _SHALLOWEST)


def padded(num_rows: int) -> int:
    """Rows of a tile for so many."""
    return max(_LEAST_ROWS, int(triton.next_power_of_2(num_rows)))


def tile(rows: int, outputs: int, depth: int, element_size: int, multiprocessors: int, *, gated: bool) -> Tile:
    """A tile of so many rows for weights of so many outputs and inputs: some programs for each multiprocessor, much in flight."""
    if rows > FEW_ROWS:
        return _tile_of_many(rows, outputs, depth, element_size, multiprocessors, gated=gated)
    wanted = _LEAST_OUTPUTS if outputs <= _MOST_PROGRAMS * multiprocessors * _LEAST_OUTPUTS else 2 * _LEAST_OUTPUTS
    columns, stages = _GATED[element_size == 1] if gated else _PLAIN[rows]
    at_once = next(size for size in (512, 256, 128, 64, 32, 16) if depth % size == 0 and size <= columns * 2 // max(2, element_size))
    parts = max(1, min(multiprocessors // triton.cdiv(outputs, wanted), _MOST_PARTS, depth // at_once))
    stage = at_once * (wanted * element_size * (1 + gated) + 2 * rows)
    return Tile(wanted, at_once, parts, min(1 + (stages - 1) * columns // at_once, 1 + _PROGRAM_BYTES // stage, _MOST_STAGES))


def _tile_of_many(rows: int, outputs: int, depth: int, element_size: int, multiprocessors: int, *, gated: bool) -> Tile:
    """Each block of outputs reads all rows, so with many rows there are fewer blocks, in parts."""
    fitting = [size for size in (64, 32) if size * rows * (1 + gated) <= _MOST_SUMS]
    wanted = next((size for size in fitting if outputs // size >= 2 * multiprocessors // 5), _LEAST_OUTPUTS)
    blocks = triton.cdiv(outputs, wanted)
    shared = min(_SHARED_BYTES // min(4, triton.cdiv(blocks, multiprocessors)), _PROGRAM_BYTES)
    column = wanted * element_size * (1 + gated) + 2 * rows
    # Two of three stages are in flight.
    most = max(min(shared // (2 * column), _DEEPEST), _SHALLOW_BYTES // element_size)
    at_once = next(size for size in (256, 128, 64, 32, 16) if depth % size == 0 and size <= most)
    parts = max(1, min(multiprocessors // blocks, _MOST_PARTS, depth // at_once))
    return Tile(wanted, at_once, parts, min(shared // (column * at_once) + 1, _MOST_STAGES))


@dataclass(frozen=True)
class Workspace:
    """Where the parts of a product meet, on one device. Used by one launch after the other; `arrived` is zero between them.

    sums float32 [programs, 2, rows, outputs of a program] flat, arrived int32 [blocks of outputs].
    """

    sums: torch.Tensor
    arrived: torch.Tensor


@dataclass(frozen=True)
class Products:
    """The products of one model on one device."""

    multiprocessors: int
    chained: bool

    def tile(self, rows: int, matrix: Matrix, *, gated: bool) -> Tile:
        """How a matrix is cut for so many rows, padded."""
        outputs, depth = matrix.weight.shape
        return tile(rows, outputs // (1 + gated), depth, matrix.weight.element_size(), self.multiprocessors, gated=gated)

    def workspace(self, matrices: Iterable[tuple[Matrix, bool]], device: torch.device) -> Workspace:
        """Room for each of the matrices, which are gated or not."""
        sums = blocks = 1
        sizes = sorted({padded(num_rows) for num_rows in range(1, MOST_ROWS + 1)})
        for (matrix, gated), rows in product(matrices, sizes):
            cut = self.tile(rows, matrix, gated=gated)
            count = triton.cdiv(matrix.weight.shape[0] // (1 + gated), cut.outputs)
            blocks = max(blocks, count)
            if cut.parts > 1:
                sums = max(sums, count * cut.parts * 2 * rows * cut.outputs)
        return Workspace(
            torch.zeros(sums, dtype=torch.float32, device=device),
            torch.zeros(blocks, dtype=torch.int32, device=device),
        )

    def feed(self, stream: torch.Tensor, norm: Norm) -> Fed:
        """What a norm makes of rows [n, in] that are contiguous."""
        num_rows, width = stream.shape
        fed = Fed(torch.empty_like(stream), stream.new_empty(1, padded(num_rows), dtype=torch.float32), norm)
        feed_kernel[(num_rows,)](stream, norm.weight, fed.rows, fed.squares, width, BLOCK=triton.next_power_of_2(width))
        return fed

    def multiply(self, rows: torch.Tensor | Fed, matrix: Matrix, workspace: Workspace, *, gated: bool = False) -> torch.Tensor:
        """rows [n, in], n <= MOST_ROWS, normed if they are fed, times the weights: [n, out].

        `gated`: the first half of the weights is a gate; [n, out / 2], SiLU(gate) * up.
        """
        values = rows.rows if isinstance(rows, Fed) else rows
        output = values.new_empty(values.shape[0], matrix.weight.shape[0] // (1 + gated))
        self._launch(values, matrix, workspace, output, fed=rows if isinstance(rows, Fed) else None, gated=gated)
        return output

    def add(self, rows: torch.Tensor, matrix: Matrix, workspace: Workspace, stream: torch.Tensor) -> None:
        """Add rows [n, in] times the weights to a stream [n, out].

        A chained kernel reads the stream early: the kernel just before must not have written it.
        """
        self._launch(rows, matrix, workspace, stream, added=True)

    def add_feeding(self, rows: torch.Tensor, matrix: Matrix, workspace: Workspace, stream: torch.Tensor, norm: Norm) -> Fed:
        """As `add`, and what a norm makes of the stream then."""
        tile_rows = padded(rows.shape[0])
        blocks = triton.cdiv(stream.shape[1], self.tile(tile_rows, matrix, gated=False).outputs)
        feeding = Fed(torch.empty_like(stream), stream.new_empty(blocks, tile_rows, dtype=torch.float32), norm)
        self._launch(rows, matrix, workspace, stream, feeding=feeding, added=True)
        return feeding

    def _launch(
        self,
        rows: torch.Tensor,
        matrix: Matrix,
        workspace: Workspace,
        output: torch.Tensor,
        *,
        fed: Fed | None = None,
        feeding: Fed | None = None,
        gated: bool = False,
        added: bool = False,
    ) -> None:
        num_rows, width_in = rows.shape
        assert num_rows <= MOST_ROWS, "the workspace has room for no more"
        width_out = output.shape[1]
        tile_rows = padded(num_rows)
        cut = self.tile(tile_rows, matrix, gated=gated)
        product_kernel[(triton.cdiv(width_out, cut.outputs), cut.parts)](
            rows,
            matrix.weight,
            rows if matrix.scales is None else matrix.scales,
            rows if matrix.bias is None else matrix.bias,
            rows if fed is None else fed.squares,
            output,
            rows if feeding is None else feeding.norm.weight,
            rows if feeding is None else feeding.rows,
            rows if feeding is None else feeding.squares,
            workspace.sums,
            workspace.arrived,
            num_rows,
            width_in,
            width_out,
            rows.stride(0),
            1 if fed is None else fed.squares.shape[0],
            1.0 if fed is None else fed.norm.eps,
            ROWS=tile_rows,
            OUTPUTS=cut.outputs,
            SLICES=cut.slices,
            DEPTH=cut.depth // cut.slices,
            PARTS=cut.parts,
            BLOCKS=triton.next_power_of_2(triton.cdiv(width_in, _LEAST_OUTPUTS)),
            NORMED=fed is not None,
            GATED=gated,
            ADDED=added,
            FEEDING=feeding is not None,
            BIASED=matrix.bias is not None,
            SCALED=matrix.scales is not None,
            CHAINED=self.chained,
            num_warps=cut.warps,
            num_stages=cut.stages,
            launch_pdl=self.chained,
        )
