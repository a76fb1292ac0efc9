"""How the products of a drafter's layers and head are best cut and their attention is best spread: one thing after the other is changed.

Whole draft steps are measured. What a kernel takes alone says little: chained kernels share a card with their neighbours.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch

from minedraft_core.config import DrafterConfig
from minedraft_core.vllm.gpu.decode import MAX_QUERIES, DraftStep, Heads, Turn, decode
from minedraft_core.vllm.gpu.kernels import HEADER, row_width
from minedraft_core.vllm.gpu.products import Fed, Matrix, Norm, Products, Tile
from tests.gpu.check.cuts import Shaped, other_heads, products_of
from tests.gpu.check.descent import descend
from tests.gpu.check.findings import attempt, figure, say
from tests.gpu.check.replay import fastest
from tests.gpu.check.step import CONTEXT, MAX_LEN, PAGE, allocated, configuration

SECONDS = {"as_saved": 200, "fp8": 100}  # of the search, by how the weights are kept
ROUNDS, NOISE = 2, 0.004
REPEATS, WARMUP = 15, 3  # of a draft
COMPILERS = 12
ATTENTION = "attention"
Place = Shaped | str
Way = Tile | Heads


@dataclass(frozen=True)
class Given(Products):
    """Products that are cut as it is given by the padded rows and the weights' shape."""

    tiles: Mapping[tuple[int, int, int], Tile] = field(default_factory=dict)

    def tile(self, rows: int, matrix: Matrix, *, gated: bool) -> Tile:
        given = self.tiles.get((rows, *matrix.weight.shape))
        return super().tile(rows, matrix, gated=gated) if given is None else given


def given(settings: Mapping[Place, Way], products: Products) -> Given:
    """The products with these tiles."""
    tiles = {(place.rows, place.outputs, place.depth): way for place, way in settings.items() if isinstance(place, Shaped)}
    return Given(products.multiprocessors, products.chained, tiles)


def stage_tiles(arguments) -> None:
    """From what is chosen for a batch to what is better, with the weights as they were saved and in 8 bits."""
    name, batch = arguments.pair.split("+")[1], arguments.concurrency[0]
    folder = Path(arguments.shapes, name)
    config = configuration(str(folder), arguments.k, batch)
    # Compiling holds Python's lock, so it has processes of its own; they leave what they compile in Triton's cache.
    workers = min(COMPILERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for weights, seconds in SECONDS.items():
            with attempt(weights):
                others = Others(pool, json.loads((folder / "config.json").read_text()), batch, 1 if weights == "fp8" else 2)
                others.compile(others.chosen)
                engine = allocated(config, DrafterConfig(fused="layers", weights=weights), arguments.k, batch)
                _search(Step(engine, batch, arguments.k, f"{name} {weights}", others.chosen), others, time.monotonic() + seconds)
                engine.close()


def _search(step: Step, others: Others, deadline: float) -> None:
    from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture

    # Every capture collects garbage, which takes long unless what is there is left out.
    with freeze_gc_for_cudagraph_capture():
        best = descend(others.chosen, others.offered, step.measure, rounds=ROUNDS, noise=NOISE, ended=lambda: time.monotonic() > deadline)
        before, after = (min(took) for took in zip(*((step.measure(others.chosen), step.measure(best)) for _ in range(3)), strict=True))
    for place, way in best.items():
        say(None, f"{step.name}, {_place(place)}: chosen {_way(others.chosen[place])}, best {_way(way)}")
    say(None, f"{step.name}, batch {step.batch}: {before:.0f} us a draft step as chosen, {after:.0f} at best")
    chosen, found = ({_place(place): str(way) for place, way in settings.items()} for settings in (others.chosen, best))
    figure(model=step.name, batch=step.batch, chosen=chosen, best=found, chosen_us=before, best_us=after)


class Others:
    """What else there is for each place, as far as it runs."""

    def __init__(self, pool: ProcessPoolExecutor, shape: dict, batch: int, size: int) -> None:
        """`shape`: the model's config.json; `size`: bytes of a weight."""
        self._pool, self._batch = pool, batch
        self._multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        products = Products(self._multiprocessors, chained=True)
        heads = Heads(shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"], self._multiprocessors)
        self.chosen: dict[Place, Way] = {shaped: shaped.chosen(products) for shaped in products_of(shape, batch, size)}
        self.chosen[ATTENTION] = heads
        self._runs: dict[tuple[Place, Way], list[Future]] = {}
        self._faults: dict[tuple[Place, Way], str] = {}

    def compile(self, settings: Mapping[Place, Way]) -> dict[Place, list[Way]]:
        """Begin to compile what else there is beside these settings."""
        others = {place: self._others(place, way) for place, way in settings.items()}
        for key in ((place, way) for place, ways in others.items() for way in ways):
            if key not in self._runs:
                self._runs[key] = self._submit(*key)
        return others

    def offered(self, settings: Mapping[Place, Way]) -> dict[Place, list[Way]]:
        """What else there is beside these settings, compiled."""
        others = self.compile(settings)
        for (place, way), runs in self._runs.items():
            faults = [fault for run in runs if (fault := run.result()) is not None]
            if faults and (place, way) not in self._faults:
                self._faults[place, way] = faults[0]
                say(None, f"{_place(place)}, {_way(way)}: {faults[0]}")
        return {place: [way for way in ways if (place, way) not in self._faults] for place, ways in others.items()}

    def _others(self, place: Place, way: Way) -> list[Way]:
        return other_heads(way) if isinstance(place, str) else place.others(way, self._multiprocessors)

    def _submit(self, place: Place, way: Way) -> list[Future]:
        if isinstance(place, str):
            return [self._pool.submit(fault_of, _attend, way, self._batch, queries) for queries in range(1, MAX_QUERIES + 1)]
        return [self._pool.submit(fault_of, _multiply, place, given({place: way}, Products(self._multiprocessors, chained=True)))]


class Step:
    """A draft engine that drafts for one batch, in one way after the other."""

    def __init__(self, engine, batch: int, k: int, name: str, chosen: Mapping[Place, Way]) -> None:
        self._engine, self._k, self._chosen = engine, k, chosen
        self.batch, self.name = batch, name
        self._pool = torch.cuda.graph_pool_handle()

    def measure(self, settings: Mapping[Place, Way]) -> float:
        """Microseconds of a draft step, the first and the later ones together; infinite if it does not run."""
        changed = {place: way for place, way in settings.items() if way != self._chosen[place]}
        text = "; ".join(f"{_place(place)}: {_way(way)}" for place, way in changed.items()) or "as chosen"
        took = math.inf
        with attempt(text):
            took = self._replayed(settings)
            say(None, f"{self.name}, {took:.0f} us, {text}")
            figure(model=self.name, batch=self.batch, changed={_place(place): str(way) for place, way in changed.items()}, step_us=took)
        return took

    def _replayed(self, settings: Mapping[Place, Way]) -> float:
        engine, model = self._engine, self._engine._model
        model._stack = replace(model._stack, products=given(settings, model._stack.products))
        model._workspace = model._stack.workspace()
        model._fused = (settings[ATTENTION], settings[ATTENTION].scratch(self.batch, model.device))
        engine._record(self.batch, self._pool, sampled=False)
        with torch.cuda.stream(engine._stream):
            return fastest(engine._graphs[self.batch, False], REPEATS, WARMUP) / self._k


def _place(place: Place) -> str:
    return place if isinstance(place, str) else f"{place.name}, {place.rows} rows"


def _way(way: Way) -> str:
    if isinstance(way, Heads):
        return f"{way.block} tokens at a time, {way.shortest} at least, {way.warps} warps"
    return f"{way.outputs} x {way.depth}, {way.parts} parts, {way.stages} stages, {way.warps} warps"


def fault_of(run, *arguments) -> str | None:
    """What something fails with on the card, if it does."""
    try:
        torch.set_num_threads(1)
        run(*arguments)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 -- a tile may need more than there is
        return f"{type(error).__name__}: {error}"
    return None


@lru_cache(maxsize=1)
def _inputs(shaped: Shaped) -> tuple[torch.Tensor, Matrix]:
    """Rows and weights, all zero."""
    rows = torch.zeros(shaped.rows, shaped.depth, dtype=torch.bfloat16, device="cuda")
    weight = rows.new_zeros(shaped.outputs, shaped.depth, dtype=shaped.dtype)
    scales = rows.new_zeros(shaped.outputs, dtype=torch.float32) if shaped.size == 1 else None
    return rows, Matrix(weight, None, scales)


def _multiply(shaped: Shaped, products: Products) -> None:
    """A product with all that is around it in some layer, which the kernel is compiled for."""
    rows, matrix = _inputs(shaped)
    workspace = products.workspace([(matrix, shaped.gated)], rows.device)
    if shaped.added:
        stream, norm = rows.new_zeros(shaped.rows, shaped.outputs), Norm(rows.new_zeros(shaped.outputs), 1e-6)
        products.add(rows, matrix, workspace, stream)
        products.add_feeding(rows, matrix, workspace, stream, norm)
    elif shaped.fed:
        fed = Fed(rows, rows.new_zeros(1, shaped.rows, dtype=torch.float32), Norm(rows.new_zeros(shaped.depth), 1e-6))
        products.multiply(fed, matrix, workspace, gated=shaped.gated)
    else:
        products.multiply(rows, matrix, workspace)


def _attend(heads: Heads, batch: int, queries: int) -> None:
    """Attention of a step as an engine runs it: a table of the same stride and alignment, which a kernel is compiled for."""

    def zeros(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device="cuda")

    table = zeros(batch, row_width(MAX_LEN // PAGE), dtype=torch.int32)[:, HEADER:]
    slots, positions = zeros(batch * queries, dtype=torch.int64), zeros(batch * queries, dtype=torch.int64)
    step = DraftStep(heads, heads.scratch(batch, table.device), table, zeros(batch, dtype=torch.int32) + CONTEXT, slots)
    joined = zeros(batch * queries, heads.num_heads + 2 * heads.num_kv_heads, heads.head_size)
    query, key, value = joined.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    cache = zeros(1, PAGE, heads.num_kv_heads, 2 * heads.head_size).transpose(1, 2)
    norms = (zeros(heads.head_size), zeros(heads.head_size))
    turn = Turn(positions, zeros(CONTEXT, heads.head_size), norms, 1e-6, chained=True)
    decode(step, query, key, value, cache, torch.empty_like(query, memory_format=torch.contiguous_format), 1.0, turn)
