"""Other ways of cutting a product and of spreading attention than those that are chosen, such as a card can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product

import torch

from minedraft_core.vllm.gpu.decode import Heads
from minedraft_core.vllm.gpu.products import MOST_ROWS, Matrix, Products, Tile, padded

OUTPUTS, DEPTHS, PARTS, WARPS = (16, 32, 64), (128, 256, 512), (1, 2, 4, 8), (4, 8)
STAGES, EARLY = (2, 3, 4, 5, 6, 8), (0, 1, 2, 4, 8, 16)
BLOCKS, SHORTEST, DECODE_WARPS, DECODE_STAGES = (32, 64, 128), (32, 64, 128, 256), (4, 8), (1, 2, 3)
MOST_SUMS = 2048  # of a program
COPIED = 32  # bytes of a row of weights for each warp, so that they are copied asynchronously
SHARED, PROGRAM_SHARED = 200 * 1024, 160 * 1024  # bytes of a multiprocessor, and of a program
HELD = 768  # bytes of a thread: weights read early, and the rows that go with them
FILLED = (0.7, 6)  # programs of a multiprocessor


@dataclass(frozen=True)
class Shaped:
    """One product of a layer for so many rows, padded: its weights are [outputs, depth], of `size` bytes each."""

    name: str
    rows: int
    outputs: int
    depth: int
    size: int
    gated: bool
    normed: bool

    def chosen(self, products: Products) -> Tile:
        """The tile that is taken without another being given."""
        dtype = torch.bfloat16 if self.size > 1 else torch.float8_e4m3fn
        matrix = Matrix(torch.empty(self.outputs, self.depth, dtype=dtype, device="meta"))
        return products.tile(self.rows, matrix, gated=self.gated, normed=self.normed)

    def programs(self, cut: Tile) -> int:
        return -(-self.outputs // (1 + self.gated) // cut.outputs) * cut.parts

    def shared(self, cut: Tile) -> int:
        """Bytes of shared memory of a program: a stage is being read while the others arrive; normed rows are kept once more."""
        column = cut.outputs * self.size * (1 + self.gated) + 2 * self.rows
        return cut.depth * ((cut.stages - 1) * column + 2 * self.rows * self.normed)

    def early(self, cut: Tile) -> int:
        """Bytes of weights that a program reads before its rows are there."""
        return cut.early * cut.depth * cut.outputs * self.size * (1 + self.gated)

    def fits(self, cut: Tile, multiprocessors: int) -> bool:
        """Whether all columns are covered, and programs are neither too many nor too large."""
        filled = self.programs(cut) / multiprocessors
        held = (self.early(cut) + 2 * self.rows * cut.early * cut.depth) / (32 * cut.warps)
        return (
            self.depth % (cut.depth * cut.parts) == 0
            and cut.depth // cut.slices * self.size >= COPIED
            and cut.early * cut.depth * cut.parts <= self.depth
            and cut.outputs * self.rows * (1 + self.gated) <= MOST_SUMS
            and FILLED[0] <= filled <= FILLED[1]
            and self.shared(cut) <= min(PROGRAM_SHARED, SHARED / max(1, int(filled)))
            and held <= HELD
        )

    def others(self, cut: Tile, multiprocessors: int) -> list[Tile]:
        """Tiles that read less or more early, have other stages, or another shape, as many stages as fit, and as much early or nothing."""
        found = [replace(cut, early=early) for early in EARLY] + [replace(cut, stages=stages) for stages in STAGES]
        found += [shape for given in _shapes(cut) for shape in self._filled(given, cut, multiprocessors)]
        return [other for other in dict.fromkeys(found) if other != cut and self.fits(other, multiprocessors)]

    def _filled(self, shape: Tile, cut: Tile, multiprocessors: int) -> Iterator[Tile]:
        fitting = [one for stages in STAGES if self.fits(one := replace(shape, stages=stages), multiprocessors)]
        if not fitting:
            return
        yield fitting[-1]
        most = self.early(cut) * self.programs(cut)
        for early in reversed(EARLY):
            one = replace(fitting[-1], early=early)
            if self.early(one) * self.programs(one) <= most and self.fits(one, multiprocessors):
                yield one
                return


def _shapes(cut: Tile) -> Iterator[Tile]:
    """Shapes with half or twice as much in one direction, or in two."""
    sizes = {"outputs": OUTPUTS, "depth": DEPTHS, "parts": PARTS, "warps": WARPS}
    steps = [(name, size) for name, known in sizes.items() for size in known if getattr(cut, name) in (2 * size, size // 2)]
    for (name, size), (another, other_size) in combinations_with_replacement(steps, 2):
        if name != another or size == other_size:
            yield replace(cut, **{name: size, another: other_size}, early=0)


def products_of(shape: dict, batch: int, size: int) -> list[Shaped]:
    """The products of a layer of a model with this config.json, for the steps of a draft after the first, and for the first one."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries = shape["num_attention_heads"] * head
    joined = queries + 2 * shape["num_key_value_heads"] * head
    return [
        Shaped(name, rows, outputs, depth, size, gated, normed)
        for rows in dict.fromkeys(padded(tokens) for tokens in (batch, 2 * batch) if tokens <= MOST_ROWS)
        for name, outputs, depth, gated, normed in (
            ("gate and up", 2 * inner, hidden, True, True),
            ("down", hidden, inner, False, False),
            ("qkv", joined, hidden, False, True),
            ("output", hidden, queries, False, False),
        )
    ]


def other_heads(heads: Heads) -> list[Heads]:
    """Other ways of spreading attention."""
    ways = product(BLOCKS, SHORTEST, DECODE_WARPS, DECODE_STAGES)
    found = [replace(heads, block=block, shortest=shortest, warps=warps, stages=stages) for block, shortest, warps, stages in ways]
    return [other for other in found if other != heads and (other.stages == heads.stages or replace(other, stages=heads.stages) == heads)]
