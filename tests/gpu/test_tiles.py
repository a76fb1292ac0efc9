"""The search for tiles: what it tries can be run, and it keeps what is faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minedraft_core.bench.shapes import SHAPES
from minedraft_core.vllm.gpu.decode import Heads
from minedraft_core.vllm.gpu.products import Matrix, Products, Tile, padded
from tests.gpu.check import tiles
from tests.gpu.check.cuts import STAGES, Shaped, other_heads, products_of
from tests.gpu.check.descent import descend
from tests.gpu.check.findings import FINDINGS

CARD = Products(132, chained=True)
COSTS = st.lists(st.lists(st.floats(1, 100), min_size=1, max_size=6), min_size=1, max_size=5)
NOISE = 0.01


class Costs:
    """What settings, a choice for each coordinate, cost together: measured with an error of up to a third of the noise."""

    def __init__(self, costs: list[list[float]], errors: list[float]) -> None:
        self.costs, self.errors, self.measured = costs, errors, 0

    def true(self, settings: dict[int, int]) -> float:
        return sum(self.costs[coordinate][choice] for coordinate, choice in settings.items())

    def measure(self, settings: dict[int, int]) -> float:
        self.measured += 1
        return self.true(settings) * (1 + self.errors[self.measured % len(self.errors)] * NOISE / 3)

    def descend(self, *, rounds: int = 2, ended=lambda: False) -> dict[int, int]:
        start = dict.fromkeys(range(len(self.costs)), 0)

        def offered(best):
            return {
                coordinate: [choice for choice in range(len(self.costs[coordinate])) if choice != best[coordinate]] for coordinate in best
            }

        return descend(start, offered, self.measure, rounds=rounds, noise=NOISE, ended=ended)


@given(COSTS, st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_no_coordinate_is_left_with_more_than_the_noise_to_gain(costs: list[list[float]], errors: list[float]) -> None:
    found = Costs(costs, errors)
    best = found.descend()
    start = found.true(dict.fromkeys(best, 0))
    assert found.true(best) <= start
    for coordinate, choice in best.items():
        gained = found.costs[coordinate][choice] - min(found.costs[coordinate])
        # The other coordinates may have been worse when this one was tried.
        assert gained <= 2 * NOISE * start
    assert found.measured <= 2 * (sum(map(len, costs)) + 7 * len(costs))


@given(COSTS, st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.integers(0, 30))
def test_a_search_that_is_ended_early_has_lost_nothing(costs: list[list[float]], errors: list[float], limit: int) -> None:
    found = Costs(costs, errors)
    best = found.descend(ended=lambda: found.measured >= limit)
    assert found.true(best) <= found.true(dict.fromkeys(best, 0))
    assert found.measured <= limit + 6


def test_the_luckiest_of_many_is_measured_once_more() -> None:
    took = iter([100.0, 99.0, 90.0, 98.0, 100.0, 100.0, 97.0, 99.5])
    found = descend({"a": 0}, lambda _: {"a": [1, 2, 3]}, lambda _: next(took), rounds=1, noise=0.004, ended=lambda: False)
    assert found == {"a": 3}


def test_a_second_round_starts_from_what_the_first_one_found() -> None:
    found = descend(
        {"a": 0},
        lambda best: {"a": [best["a"] - 1, best["a"] + 1]},
        lambda settings: 100 - 10 * settings["a"],
        rounds=2,
        noise=NOISE,
        ended=lambda: False,
    )
    assert found == {"a": 2}


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "llama-3.2-1b"])
def test_other_tiles_cover_their_matrix_and_fit_a_card(name: str) -> None:
    for size, batch in ((2, 1), (2, 8), (2, 12), (1, 8), (1, 32)):
        for shaped in products_of({"head_dim": 64, **SHAPES[name]}, batch, size):
            chosen = shaped.chosen(CARD)
            others = shaped.others(chosen, CARD.multiprocessors)
            assert len(set(others) - {chosen}) == len(others) > 0
            for cut in others:
                assert shaped.depth % (cut.depth * cut.parts) == 0
                assert cut.depth // cut.slices >= 16
                assert cut.slices <= cut.warps
                assert shaped.shared(cut) <= 227 * 1024


def test_shapes_are_tried_with_many_stages_and_with_two() -> None:
    shaped = Shaped("down", 8, 2048, 6144, 2, added=True)
    chosen = shaped.chosen(CARD)
    stages: dict[Tile, set[int]] = {}
    for cut in shaped.others(chosen, CARD.multiprocessors):
        stages.setdefault(replace(cut, stages=0), set()).add(cut.stages)
    own = stages.pop(replace(chosen, stages=0))
    assert len(own) > 1
    for shape, tried in stages.items():
        fitting = [number for number in STAGES if shaped.fits(replace(shape, stages=number), CARD.multiprocessors)]
        assert tried == {2, max(fitting)}


def test_products_are_cut_as_it_is_given() -> None:
    later, first = (Shaped("down", rows, 64, 512, 2, added=True) for rows in (8, 16))
    cut = Tile(16, 128, 4, 2)
    products = tiles.given({later: cut, tiles.ATTENTION: Heads(4, 2, 16, 132)}, CARD)
    matrix = Matrix(torch.zeros(64, 512, dtype=torch.bfloat16))
    assert products.tile(8, matrix, gated=False) == cut
    assert products.tile(16, matrix, gated=False) == first.chosen(CARD)
    workspace = products.workspace([(matrix, False)], torch.device("cpu"))
    assert len(workspace.sums) >= 4 * cut.parts * 2 * 8 * cut.outputs


def test_rows_of_both_kinds_of_steps_are_tried() -> None:
    shape = SHAPES["qwen3-1.7b"]
    assert [shaped.rows for shaped in products_of(shape, 8, 2)] == [8] * 5 + [16] * 4
    assert {shaped.rows for shaped in products_of(shape, 3, 2)} == {8}
    assert {shaped.rows for shaped in products_of(shape, 64, 1)} == {padded(64)}


def test_attention_is_spread_otherwise() -> None:
    heads = Heads(16, 8, 128, 132)
    others = other_heads(heads)
    assert len({heads, *others}) == len(others) + 1
    assert {field for other in others for field in vars(heads) if getattr(other, field) != getattr(heads, field)} == {
        "block",
        "shortest",
        "warps",
    }


def test_what_is_best_is_told_beside_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("lines", []), ("figures", []), ("file", None)):
        monkeypatch.setattr(FINDINGS, name, value)
    shaped, heads = Shaped("down", 8, 2048, 6144, 2, added=True), Heads(16, 8, 128, 132)
    chosen = {shaped: shaped.chosen(CARD), tiles.ATTENTION: heads}

    class Step(tiles.Step):
        def _replayed(self, settings):
            if settings[shaped].warps == 8:
                raise RuntimeError("broke")
            return 100.0 - settings[shaped].parts + settings[tiles.ATTENTION].block

    def offered(settings):
        return {shaped: shaped.others(settings[shaped], 132), tiles.ATTENTION: other_heads(settings[tiles.ATTENTION])}

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    ticks = count()
    monkeypatch.setattr(tiles.time, "monotonic", lambda: next(ticks))
    step = Step(None, 8, 4, "model", chosen)
    tiles._search(step, SimpleNamespace(chosen=chosen, offered=offered), 10_000)
    found = FINDINGS.figures[-1]
    assert found["best_us"] == 100 - 4 + 32
    assert found["chosen_us"] == 100 - 1 + 64
    assert found["best"]["down, 8 rows"] == next(
        figure["changed"]["down, 8 rows"] for figure in FINDINGS.figures if figure.get("step_us") == found["best_us"]
    )
    assert any("broke" in line["text"] for line in FINDINGS.lines)
