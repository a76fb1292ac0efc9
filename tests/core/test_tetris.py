"""The choice of draft tokens: prefixes, capacity, the best there is, and the same on every tie."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minedraft_core.choice import Everything
from minedraft_core.tetris import Tetris, choose
from minedraft_core.types import Draft

pytestmark = pytest.mark.usefixtures("single_thread")

LOGPROBS = st.one_of(st.floats(-20, 0), st.sampled_from([0.0, -0.0, -1.0, -1e-9, -math.inf]))
ROWS = st.lists(st.lists(LOGPROBS, max_size=6), min_size=1, max_size=6)


def kept(rows, capacity, padding=0.0):
    width = max(map(len, rows))
    padded = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows]).reshape(len(rows), width)
    counts = choose(padded, torch.tensor([len(row) for row in rows]), capacity)
    assert counts.dtype is torch.int64
    return counts.tolist()


@given(ROWS, st.integers(0, 40))
def test_each_draft_keeps_a_prefix_and_the_capacity_is_used_exactly(rows, capacity):
    counts = kept(rows, capacity)
    assert all(0 <= count <= len(row) for count, row in zip(counts, rows, strict=True))
    assert sum(counts) == min(capacity, sum(map(len, rows)))


@given(ROWS, st.integers(0, 40), st.sampled_from([math.nan, -math.inf, 5.0]))
def test_what_lies_past_a_draft_is_not_read(rows, capacity, padding):
    assert kept(rows, capacity, padding) == kept(rows, capacity)


def expected_accepted(rows, counts):
    """Expected accepted tokens if each token is accepted with the drafter's probability for it."""
    return sum(math.exp(sum(row[: place + 1])) for row, count in zip(rows, counts, strict=True) for place in range(count))


@given(st.lists(st.lists(LOGPROBS, max_size=3), min_size=1, max_size=4), st.integers(0, 12))
def test_no_other_prefixes_promise_more_accepted_tokens(rows, capacity):
    best = max(
        expected_accepted(rows, counts) for counts in itertools.product(*(range(len(row) + 1) for row in rows)) if sum(counts) <= capacity
    )
    assert expected_accepted(rows, kept(rows, capacity)) == pytest.approx(best, abs=1e-6)


def test_a_tie_goes_to_the_earlier_position_then_to_the_earlier_request():
    assert kept([[0.0] * 3] * 3, 4) == [2, 1, 1]
    assert kept([[-1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], 3) == [2, 1]


def test_a_sure_draft_is_kept_whole_before_a_doubtful_one_begins():
    assert kept([[-0.1, -0.1, -0.1, -0.1], [-0.5, -0.5, -0.5, -0.5], [-3.0, 0.0, 0.0, 0.0]], 6) == [4, 2, 0]


def test_an_impossible_token_is_kept_only_after_all_others():
    assert kept([[-math.inf, 0.0], [-50.0, -50.0]], 2) == [0, 2]
    assert kept([[-math.inf, 0.0], [-50.0, -50.0]], 3) == [1, 2]


def test_a_long_draft_keeps_its_small_terms():
    """In float32 a sum of 64 terms of one ten-millionth after a large one would stand still, and 29 of the first draft be kept."""
    row = [-16.0, *[-1e-7] * 63]
    assert kept([row, [-16.0, -2e-6]], 30) == [28, 2]


def test_the_furthest_kept_position_is_what_torch_scatter_gives():
    torch_scatter = pytest.importorskip("torch_scatter")
    generator = torch.Generator().manual_seed(2)
    logprobs = -torch.rand(16, 8, generator=generator)
    counts = choose(logprobs, torch.full((16,), 8), 50)
    best = logprobs.double().cumsum(1).T.reshape(-1).sort(descending=True, stable=True).indices[:50]
    furthest, _ = torch_scatter.scatter_max(best // 16 + 1, best % 16, dim_size=16, out=torch.zeros(16, dtype=torch.int64))
    assert counts.tolist() == furthest.tolist()


def drafts_of(*rows):
    return {f"r{number}": Draft(list(range(len(row))), list(row)) for number, row in enumerate(rows)}


SURE, DOUBTFUL = [-0.01] * 6, [-2.0] * 6


def counts_of(choice, *rows, num_drafts=4, sides=1):
    return [len(tokens) for tokens in choice.keep(drafts_of(*rows), num_drafts, sides).values()]


def test_everything_is_kept_without_it():
    assert Everything().width(4, 100) == 4
    assert counts_of(Everything(), SURE, DOUBTFUL) == [6, 6]


@pytest.mark.parametrize(("batch", "width", "counts"), [(1, 4, [4]), (2, 6, [6, 1]), (3, 6, [6, 1, 0])])
def test_one_threshold_decides_what_is_drafted_and_what_is_kept(batch, width, counts):
    choice = Tetris(extra=2, turn_on=2, capacity=7, max_requests=8)
    assert choice.width(4, batch) == width
    assert counts_of(choice, *[SURE, DOUBTFUL, [-9.0] * 6][:batch]) == counts


@pytest.mark.parametrize(("sides", "num_drafts", "total"), [(1, 4, 20), (2, 4, 12), (2, 1, 3), (1, 1, 5)])
def test_without_a_figure_the_capacity_is_that_of_a_full_batch(sides, num_drafts, total):
    rows = [SURE, DOUBTFUL, SURE, DOUBTFUL, SURE]
    choice = Tetris(extra=2, turn_on=0, capacity=0, max_requests=5)
    assert sum(counts_of(choice, *rows, num_drafts=num_drafts, sides=sides)) == total


def test_without_log_probabilities_earlier_positions_come_first():
    drafts = {"a": Draft([1, 2, 3]), "b": Draft([4, 5, 6])}
    assert Tetris(0, 1, 3, 8).keep(drafts, 3, 1) == {"a": [1, 2], "b": [4]}


def test_no_draft_and_empty_drafts():
    choice = Tetris(0, 1, 3, 8)
    assert choice.keep({}, 3, 1) == {}
    assert choice.keep({"a": Draft([]), "b": Draft([])}, 3, 1) == {"a": [], "b": []}
