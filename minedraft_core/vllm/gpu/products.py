"""Products of a few rows with the weights of a layer, in one kernel with what surrounds them: see `product_kernels`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch
import triton

from minedraft_core.vllm.gpu.product_kernels import product_kernel

MOST_ROWS = 64
_LEAST_ROWS = 8  # of the right operand on tensor cores
_SHALLOWEST = 16  # columns of a slice, likewise
_SHALLOW_BYTES = 128  # of a row of weights at once: less than 32 for each warp are not copied asynchronously
_DEEPEST = 256
_FEW_ROWS = 16
_MOST_SUMS = 2048  # of a program: 64 registers of a thread
_MOST_PARTS = 8
_MOST_STAGES = 6
_SHARED_BYTES = 176 * 1024  # of a multiprocessor for one kernel, so that the next one's programs fit beside it
_PROGRAM_BYTES = 96 * 1024  # likewise, of one program
_EARLY_BYTES = 96 * 1024  # likewise, of weights that are read before the rows are there
_EARLY_ROW_BYTES = 32 * 1024  # of the rows that go with a program's


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
class Tile:
    """What one program computes: so many outputs, read so many columns at a time, of one of `parts` of the depth.

    `early`: how many times so many columns are read before the rows are there, a power of two or none.
    """

    outputs: int
    depth: int
    parts: int
    stages: int = 4
    warps: int = 4
    early: int = 0

    @property
    def slices(self) -> int:
        """Into how many the columns are cut, for as many warps."""
        return min(self.warps, self.depth // _SHALLOWEST)


def padded(num_rows: int) -> int:
    """Rows of a tile for so many."""
    return max(_LEAST_ROWS, int(triton.next_power_of_2(num_rows)))


def tile(rows: int, outputs: int, depth: int, element_size: int, multiprocessors: int, *, gated: bool, normed: bool) -> Tile:
    """A tile of so many rows for weights of so many outputs and inputs: some programs for each multiprocessor, much in flight."""
    fitting = [size for size in (64, 32) if size * rows * (1 + gated) <= _MOST_SUMS]
    # Each block of outputs reads all rows, so with many rows there are fewer blocks, in parts.
    least = multiprocessors if rows <= _FEW_ROWS else 2 * multiprocessors // 5
    wanted = next((size for size in fitting if outputs // size >= least), 16)
    blocks = triton.cdiv(outputs, wanted)
    shared = min(_SHARED_BYTES // min(4, triton.cdiv(blocks, multiprocessors)), _PROGRAM_BYTES)
    column = wanted * element_size * (1 + gated) + 2 * rows
    # Two of three stages are in flight; normed rows are kept once more.
    most = max(min(shared // (2 * column + 2 * rows), _DEEPEST), _SHALLOW_BYTES // element_size)
    at_once = next(size for size in (256, 128, 64, 32, 16) if depth % size == 0 and size <= most)
    parts = max(1, min(multiprocessors // blocks, _MOST_PARTS, depth // at_once))
    stages = max(3, min((shared - 2 * rows * at_once) // (column * at_once) + 1, _MOST_STAGES))
    weights = _EARLY_BYTES // triton.cdiv(blocks * parts, multiprocessors) // (at_once * wanted * element_size * (1 + gated))
    values = _EARLY_ROW_BYTES // (2 * rows * (1 + normed)) // at_once
    # All parts have as many columns then.
    early = min(weights, values, depth // (at_once * parts)) if depth % (at_once * parts) == 0 else 0
    return Tile(wanted, at_once, parts, stages, early=1 << early.bit_length() - 1 if early else 0)


@dataclass(frozen=True)
class Workspace:
    """Where the parts of a product meet, on one device. Used by one launch after the other; `arrived` is zero between them.

    sums float32 [programs, 2, rows, outputs of a program] flat, squares float32 [programs, rows] flat, arrived int32 [blocks of outputs].
    """

    sums: torch.Tensor
    squares: torch.Tensor
    arrived: torch.Tensor


@dataclass(frozen=True)
class Products:
    """The products of one model on one device."""

    multiprocessors: int
    chained: bool

    def tile(self, rows: int, matrix: Matrix, *, gated: bool, normed: bool) -> Tile:
        """How a matrix is cut for so many rows, padded."""
        outputs, depth = matrix.weight.shape
        return tile(rows, outputs // (1 + gated), depth, matrix.weight.element_size(), self.multiprocessors, gated=gated, normed=normed)

    def workspace(self, matrices: Iterable[tuple[Matrix, bool]], device: torch.device) -> Workspace:
        """Room for each of the matrices, which are gated or not."""
        sums = squares = blocks = 1
        sizes = sorted({padded(num_rows) for num_rows in range(1, MOST_ROWS + 1)})
        for (matrix, gated), rows in product(matrices, sizes):
            cut = self.tile(rows, matrix, gated=gated, normed=False)
            count = triton.cdiv(matrix.weight.shape[0] // (1 + gated), cut.outputs)
            blocks = max(blocks, count)
            if cut.parts > 1:
                sums = max(sums, count * cut.parts * 2 * rows * cut.outputs)
                squares = max(squares, count * cut.parts * rows)
        return Workspace(
            torch.zeros(sums, dtype=torch.float32, device=device),
            torch.zeros(squares, dtype=torch.float32, device=device),
            torch.zeros(blocks, dtype=torch.int32, device=device),
        )

    def multiply(
        self,
        rows: torch.Tensor,
        matrix: Matrix,
        workspace: Workspace,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        """rows [n, in], n <= MOST_ROWS, normed if there is a norm, times the weights: [n, out].

        `residual` [n, out] is added, and gets the result. A chained kernel reads it early: the kernel just before must not have written it.

        `gated`: the first half of the weights is a gate; [n, out / 2], SiLU(gate) * up.
        """
        num_rows, width_in = rows.shape
        width_out = matrix.weight.shape[0] // (1 + gated)
        output = rows.new_empty(num_rows, width_out) if residual is None else residual
        tile_rows = padded(num_rows)
        cut = self.tile(tile_rows, matrix, gated=gated, normed=norm is not None)
        product_kernel[(triton.cdiv(width_out, cut.outputs), cut.parts)](
            rows,
            matrix.weight,
            rows if matrix.scales is None else matrix.scales,
            rows if matrix.bias is None else matrix.bias,
            rows if norm is None else norm.weight,
            output,
            output,
            workspace.sums,
            workspace.squares,
            workspace.arrived,
            num_rows,
            width_in,
            width_out,
            rows.stride(0),
            0.0 if norm is None else norm.eps,
            ROWS=tile_rows,
            OUTPUTS=cut.outputs,
            SLICES=cut.slices,
            DEPTH=cut.depth // cut.slices,
            PARTS=cut.parts,
            EARLY=cut.early,
            NORMED=norm is not None,
            GATED=gated,
            ADDED=residual is not None,
            BIASED=matrix.bias is not None,
            SCALED=matrix.scales is not None,
            CHAINED=self.chained,
            num_warps=cut.warps,
            num_stages=cut.stages,
            launch_pdl=self.chained,
        )
        return output
