"""Other ways of cutting a product and of spreading attention than those that are chosen, such as a card can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product

import torch

from minedraft_core.vllm.gpu.decode import Heads
from minedraft_core.vllm.gpu.products import FEW_ROWS, MOST_ROWS, Matrix, Products, Tile, padded

OUTPUTS, DEPTHS, PARTS, WARPS, STAGES = (16, 32, 64), (128, 256, 512), (1, 2, 4, 8), (4, 8), (2, 3, 4, 5, 6, 8)
BLOCKS, SHORTEST, DECODE_WARPS = (32, 64, 128), (32, 64, 128, 256), (4, 8)
MOST_SUMS = 2048  # of a program
COPIED = 32  # bytes of a row of weights for each warp, so that they are copied asynchronously
SHARED, PROGRAM_SHARED = 200 * 1024, 160 * 1024  # bytes of a multiprocessor, and of a program
FILLED = (0.7, 6)  # programs of a multiprocessor: at least, and at most if they are parts
SIDE_BY_SIDE = 4  # of them, at most, that have to fit a multiprocessor together
VOCABULARY = 64  # tokens that a head's rows are padded to a multiple of


@dataclass(frozen=True)
class Shaped:
    """One product for so many rows, padded: its weights are [outputs, depth], of `size` bytes each.

    `fed`: its rows are normed; `added`: it is added to the stream and feeds the next norm.
    """

    name: str
    rows: int
    outputs: int
    depth: int
    size: int
    gated: bool = False
    fed: bool = False
    added: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.bfloat16 if self.size > 1 else torch.float8_e4m3fn

    def chosen(self, products: Products) -> Tile:
        """The tile that is taken without another being given."""
        matrix = Matrix(torch.empty(self.outputs, self.depth, dtype=self.dtype, device="meta"))
        return products.tile(self.rows, matrix, gated=self.gated)

    def programs(self, cut: Tile) -> int:
        return -(-self.outputs // (1 + self.gated) // cut.outputs) * cut.parts

    def shared(self, cut: Tile) -> int:
        """Bytes of shared memory of a program: a stage is being read while the others arrive."""
        column = cut.outputs * self.size * (1 + self.gated) + 2 * self.rows
        return cut.depth * (cut.stages - 1) * column

    def fits(self, cut: Tile, multiprocessors: int) -> bool:
        """Whether all columns are covered, and programs are neither too many nor too large."""
        filled = self.programs(cut) / multiprocessors
        return (
            self.depth % (cut.depth * cut.parts) == 0
            and cut.depth // cut.slices * self.size >= COPIED
            and cut.outputs * self.rows * (1 + self.gated) <= MOST_SUMS
            and filled >= FILLED[0]
            and (cut.parts == 1 or filled <= FILLED[1])
            and self.shared(cut) <= min(PROGRAM_SHARED, SHARED // min(max(1, int(filled)), SIDE_BY_SIDE))
        )

    def others(self, cut: Tile, multiprocessors: int) -> list[Tile]:
        """Tiles that have other stages, or another shape with as many stages as fit and with the fewest."""
        found = self._staged(cut, multiprocessors)
        for shape in _shapes(cut):
            staged = self._staged(shape, multiprocessors)
            found += staged[-1:] + staged[:1]
        return [other for other in dict.fromkeys(found) if other != cut]

    def _staged(self, shape: Tile, multiprocessors: int) -> list[Tile]:
        """The shape with each number of stages that fits."""
        return [one for stages in STAGES if self.fits(one := replace(shape, stages=stages), multiprocessors)]


def _shapes(cut: Tile) -> Iterator[Tile]:
    """Shapes with half or twice as much in one direction, or in two."""
    sizes = {"outputs": OUTPUTS, "depth": DEPTHS, "parts": PARTS, "warps": WARPS}
    steps = [(name, size) for name, known in sizes.items() for size in known if getattr(cut, name) in (2 * size, size // 2)]
    for (name, size), (another, other_size) in combinations_with_replacement(steps, 2):
        if name != another or size == other_size:
            yield replace(cut, **{name: size, another: other_size})


def products_of(shape: dict, batch: int, size: int) -> list[Shaped]:
    """The products of a draft of a model with this config.json: its head, and a layer's in the steps after the first and in the first."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries = shape["num_attention_heads"] * head
    joined = queries + 2 * shape["num_key_value_heads"] * head
    vocabulary = -(-shape["vocab_size"] // VOCABULARY) * VOCABULARY
    most = FEW_ROWS if size > 1 else MOST_ROWS
    found = [Shaped("head", padded(batch), vocabulary, hidden, size)] if batch <= most else []
    for rows in dict.fromkeys(padded(tokens) for tokens in (batch, 2 * batch) if tokens <= most):
        found += [
            Shaped("gate and up", rows, 2 * inner, hidden, size, gated=True, fed=True),
            Shaped("down", rows, hidden, inner, size, added=True),
            Shaped("qkv", rows, joined, hidden, size, fed=True),
            Shaped("output", rows, hidden, queries, size, added=True),
        ]
    return found


def other_heads(heads: Heads) -> list[Heads]:
    """Other ways of spreading attention."""
    ways = product(BLOCKS, SHORTEST, DECODE_WARPS)
    found = [replace(heads, block=block, shortest=shortest, warps=warps) for block, shortest, warps in ways]
    return [other for other in found if other != heads]
