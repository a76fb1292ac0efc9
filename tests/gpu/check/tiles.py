"""How the products of a drafter's layers are best cut and their attention is best spread, measured."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path

import torch

from minedraft_core.vllm.gpu.decode import DraftStep, Heads, Turn, decode
from minedraft_core.vllm.gpu.products import Matrix, Norm, Products, Tile, Workspace, padded
from minedraft_core.vllm.gpu.weights import eight_bits
from tests.gpu.check.findings import attempt, figure, say
from tests.gpu.check.replay import fastest

OUTPUTS, DEPTHS, PARTS, STAGES, WARPS = (16, 32, 64), (128, 256, 512), (1, 2, 4), (3, 4, 6), (4, 8)
SHARED = range(24 * 1024, 200 * 1024)  # bytes of shared memory that a tile may take
MOST_SUMS = 2048
COPIES, REPEATS = 16, 20  # of a matrix, so that none is found in the L2 cache; of their products
COMPILERS = 12
CONTEXT, PAGE = 256, 16
ATTENTION = tuple(product((64, 128), (64, 128, 256), (4, 8), (3,)))  # tokens at a time and of a part at least, warps, stages


@dataclass(frozen=True)
class Fixed(Products):
    """Products that are cut in one way."""

    cut: Tile

    def tile(self, rows: int, matrix: Matrix, *, gated: bool, normed: bool) -> Tile:
        return self.cut


@dataclass(frozen=True)
class Shaped:
    """One product of a layer: its name, weights [outputs, depth] in 8 bits or not, how many rows, and what surrounds it."""

    name: str
    outputs: int
    depth: int
    gated: bool
    normed: bool
    eight: bool
    rows: int

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @cached_property
    def multiprocessors(self) -> int:
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def element_size(self) -> int:
        return 1 if self.eight else 2

    @cached_property
    def first(self) -> Matrix:
        weight = torch.randn(self.outputs, self.depth, device=self.device).mul_(0.02).bfloat16()
        if not self.eight:
            return Matrix(weight)
        quantized, scales = eight_bits(weight)
        return Matrix(quantized, None, scales.flatten())

    @cached_property
    def values(self) -> torch.Tensor:
        return torch.randn(self.rows, self.depth, device=self.device).bfloat16()

    @cached_property
    def norm(self) -> Norm | None:
        return Norm(torch.ones(self.depth, device=self.device, dtype=torch.bfloat16), 1e-6) if self.normed else None

    @cached_property
    def residual(self) -> torch.Tensor | None:
        return None if self.normed else torch.zeros(self.rows, self.outputs, device=self.device, dtype=torch.bfloat16)

    def workspace(self, cut: Tile) -> Workspace:
        return Fixed(self.multiprocessors, True, cut).workspace([(self.first, self.gated)], self.device)

    def multiply(self, cut: Tile, matrix: Matrix, workspace: Workspace) -> None:
        products = Fixed(self.multiprocessors, True, cut)
        products.multiply(self.values, matrix, workspace, self.norm, self.residual, gated=self.gated)


def stage_tiles(arguments) -> None:
    """The fastest tiles of each product for a batch, and the one that is chosen."""
    shape = json.loads(Path(arguments.shapes, arguments.pair.split("+")[1], "config.json").read_text())
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries = shape["num_attention_heads"] * head
    joined = queries + 2 * shape["num_key_value_heads"] * head
    with attempt("attention"):
        _attention(shape["num_attention_heads"], shape["num_key_value_heads"], head, arguments.concurrency[0])
    # Compiling holds Python's lock, so it has processes of its own; they leave what they compile in Triton's cache.
    workers = min(COMPILERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for eight in (False, True):
            common = {"eight": eight, "rows": arguments.concurrency[0]}
            for shaped in (
                Shaped("qkv", joined, hidden, gated=False, normed=True, **common),
                Shaped("output", hidden, queries, gated=False, normed=False, **common),
                Shaped("gate and up", 2 * inner, hidden, gated=True, normed=True, **common),
                Shaped("down", hidden, inner, gated=False, normed=False, **common),
            ):
                with attempt(shaped.name):
                    _tiles(shaped, pool)


def _tiles(shaped: Shaped, pool: ProcessPoolExecutor) -> None:
    weight = shaped.first.weight
    matrices = [replace(shaped.first, weight=weight.clone()) for _ in range(COPIES)]
    chosen = Products(shaped.multiprocessors, chained=True).tile(
        padded(shaped.rows), shaped.first, gated=shaped.gated, normed=shaped.normed
    )
    found = _timed(shaped, matrices, pool, [chosen, *_sensible(shaped)])
    bytes_read = weight.numel() * weight.element_size()
    for cut in (chosen, *sorted(found, key=found.__getitem__)[:6]):
        speed = bytes_read / found[cut] / 1e6
        say(None, f"{shaped.name}{' fp8' * shaped.eight}, {shaped.rows} rows: {found[cut]:.2f} us, {speed:.2f} TB/s with {cut}")
    figure(
        product=shaped.name, eight=shaped.eight, rows=shaped.rows, chosen=str(chosen), us={str(cut): took for cut, took in found.items()}
    )


def _sensible(shaped: Shaped) -> list[Tile]:
    """Tiles that fill a card, fit in its shared memory and leave registers for sums."""
    found = []
    for outputs, depth, parts, stages, warps in product(OUTPUTS, DEPTHS, PARTS, STAGES, WARPS):
        cut = Tile(outputs, depth, parts, stages, warps=warps)
        programs = shaped.outputs // (1 + shaped.gated) // outputs * parts
        rows = padded(shaped.rows)
        shared = (stages - 1) * depth * (outputs * shaped.element_size * (1 + shaped.gated) + 2 * rows)
        whole = shaped.depth % (depth * parts) == 0 and shared in SHARED and outputs * rows * (1 + shaped.gated) <= MOST_SUMS
        if whole and 0.7 <= programs / shaped.multiprocessors <= 6:
            found.append(cut)
    return found


def _compile(shaped: Shaped, cut: Tile) -> str | None:
    """Compile and run a tile once: what it failed with."""
    try:
        shaped.multiply(cut, shaped.first, shaped.workspace(cut))
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 -- a tile may need more than there is
        return type(error).__name__
    return None


def _timed(shaped: Shaped, matrices: list[Matrix], pool: ProcessPoolExecutor, cuts: list[Tile]) -> dict[Tile, float]:
    """Microseconds of a product by tile. Tiles that do not run are left out."""
    different = list(dict.fromkeys(cuts))
    found = {}
    for cut, fault in zip(different, pool.map(_compile, [replace(shaped)] * len(different), different, chunksize=4), strict=True):
        if fault is not None:
            say(None, f"  {cut}: {fault}")
            continue
        workspace = shaped.workspace(cut)
        shaped.multiply(cut, shaped.first, workspace)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for matrix in matrices:
                shaped.multiply(cut, matrix, workspace)
        found[cut] = (graph, workspace)
    torch.cuda.synchronize()
    return {cut: fastest(graph, REPEATS, 2) / COPIES for cut, (graph, _) in found.items()}


def _attention(num_heads: int, num_kv_heads: int, size: int, rows: int) -> None:
    """Ways of running the attention of a step after `CONTEXT` tokens."""
    device = torch.device("cuda", 0)
    columns = CONTEXT // PAGE + 1
    caches = [
        torch.randn(1 + rows * columns, PAGE, num_kv_heads, 2 * size, device=device).bfloat16().transpose(1, 2) for _ in range(COPIES)
    ]
    table = 1 + torch.arange(rows * columns, dtype=torch.int32, device=device).view(rows, columns)
    positions = torch.full((rows,), CONTEXT, device=device)
    slots = table[:, CONTEXT // PAGE].long() * PAGE + CONTEXT % PAGE
    joined = torch.randn(rows, num_heads + 2 * num_kv_heads, size, device=device).bfloat16()
    query, key, value = joined.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    output, seq_lens = torch.empty(rows, num_heads, size, device=device).bfloat16(), (positions + 1).int()
    gains = torch.ones(size, device=device, dtype=torch.bfloat16)
    turn = Turn(positions, torch.ones(CONTEXT + 1, size, device=device).bfloat16(), (gains, gains), 1e-6, chained=True)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    plain = Heads(num_heads, num_kv_heads, size, multiprocessors)
    ways = [replace(plain, block=block, shortest=shortest, warps=warps, stages=stages) for block, shortest, warps, stages in ATTENTION]
    found = {}
    for heads in dict.fromkeys([plain, *ways]):
        step = DraftStep(heads, heads.scratch(rows, device), table, seq_lens, slots)
        run = partial(_attend, step, query, key, value, caches, output, 1.0, turn)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        found[heads] = fastest(graph, REPEATS, 2) / COPIES
    for heads in (plain, *sorted(found, key=found.__getitem__)[:4]):
        say(None, f"attention, {rows} requests of {CONTEXT} tokens: {found[heads]:.2f} us with {heads}")
    figure(product="attention", rows=rows, chosen=str(plain), us={str(heads): took for heads, took in found.items()})


def _attend(step, query, key, value, caches, *others) -> None:
    for cache in caches:
        decode(step, query, key, value, cache, *others)
