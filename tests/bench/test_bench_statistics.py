"""Figures from records written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from minedraft_core.bench.statistics import Run, Steady, steady_state, summarise
from minedraft_core.types import DraftRecord, LookaheadRecord, Mode, ModeRecord, Record, Span
from tests.bench.samples import START, step


def order(number: int, start_ms: float, end_ms: float, hidden_ms: float, per_position: Sequence[int] = (1, 1)) -> DraftRecord:
    return DraftRecord(number, START + round(start_ms * 1000), START + round(end_ms * 1000), round(hidden_ms * 1000), 1, list(per_position))


def steady_of(records: Sequence[Record]) -> Steady:
    steady = steady_state(records, 2)
    assert steady is not None
    return steady


def sequential_run(verify_ms: float = 20.0, draft_ms: float = 10.0, rounds: int = 4) -> list[Record]:
    """A prompt run, then rounds of two requests with drafts of 4, of which 3 and 1 are accepted, then one request alone."""
    records: list[Record] = [ModeRecord(Mode.SEQUENTIAL, 4), step(1, 0, 100, running=2, generated=2, prompt=True)]
    now = 100.0
    for number in range(rounds):
        # The first order reads the prompts.
        draft = draft_ms * (5 if number == 0 else 1)
        records.append(order(number, now, now + draft, 0))
        now += draft
        records.append(
            step(number + 2, now, now + verify_ms, running=2, generated=6, drafts=[(4, 3), (4, 1)], gap_ms=draft, wait_ms=draft - 1)
        )
        now += verify_ms
    records.append(step(rounds + 2, now, now + 500, running=1, generated=1))
    return records


def parallel_run(rounds: int = 6) -> list[Record]:
    """Two sides of one request in turn: passes of 10 ms without a gap, orders of 8 ms of which 6 are hidden."""
    records: list[Record] = [step(1, 0, 100, running=2, generated=2, prompt=True, mode=Mode.PARALLEL)]
    now = 100.0
    for number in range(rounds):
        records.append(order(number, now - 10, now - 2, 6))
        records.append(
            step(number + 2, now, now + 10, running=2, generated=3, drafts=[(4, 2)], gap_ms=0.0, wait_ms=0.0, mode=Mode.PARALLEL)
        )
        now += 10
    return records


def test_the_steady_state_leaves_out_prompts_the_first_round_and_the_tail() -> None:
    steady = steady_of(sequential_run(rounds=4))
    assert [record.step for record in steady.steps] == [3, 4, 5]
    assert [record.round for record in steady.orders] == [1, 2, 3]
    assert steady.span == Span(START + 170_000, START + 260_000)
    assert steady.tokens_per_second == pytest.approx(18 / 0.090)


def test_with_two_sides_both_have_had_their_turn_and_rounds_are_whole() -> None:
    steady = steady_of(parallel_run(rounds=7))
    assert [record.step for record in steady.steps] == [4, 5, 6, 7]
    assert steady.tokens_per_second == pytest.approx(12 / 0.040)


def test_a_second_prompt_run_begins_the_steady_state_anew() -> None:
    records = [
        *sequential_run(rounds=2)[:-1],
        step(9, 300, 400, running=2, prompt=True),
        *(step(10 + number, 400 + 10 * number, 410 + 10 * number, running=2, generated=2) for number in range(5)),
    ]
    assert [record.step for record in steady_of(records).steps] == [11, 12, 13, 14]


@pytest.mark.parametrize(
    ("records", "concurrency"), [([], 1), (sequential_run(rounds=1), 2), (parallel_run(rounds=3), 2), (sequential_run(), 3)]
)
def test_a_run_that_is_too_short_has_no_steady_state(records: list[Record], concurrency: int) -> None:
    assert steady_state(records, concurrency) is None


def test_figures_of_sequential_runs() -> None:
    runs = [Run(steady_of(sequential_run(verify_ms)), whole) for verify_ms, whole in ((20.0, 10.0), (30.0, 11.0), (100.0, 99.0))]
    figures = summarise(runs)
    assert figures.tokens_per_second == pytest.approx(6 / 0.040)
    assert figures.tokens_per_second_runs == pytest.approx((6 / 0.030, 6 / 0.040, 6 / 0.110))
    assert figures.tokens_per_second_whole == 11.0
    assert figures.steps == 9
    assert figures.verify_ms == pytest.approx(30.0)
    assert figures.draft_ms == pytest.approx(10.0)
    assert figures.gap_ms == pytest.approx(10.0)
    assert figures.wait_ms == pytest.approx(9.0)
    assert figures.overhead_ms == pytest.approx(0.5)
    assert figures.hidden_share == 0.0
    assert (figures.drafted, figures.accepted) == (72, 36)
    assert figures.acceptance_length == pytest.approx(3.0)


def test_hidden_share_of_parallel_runs() -> None:
    figures = summarise([Run(steady_of(parallel_run()), 1.0)])
    assert figures.hidden_share == pytest.approx(0.75)
    assert figures.draft_ms == pytest.approx(8.0)
    assert figures.acceptance_length == pytest.approx(3.0)


def test_figures_that_do_not_apply_to_plain_decoding_are_none() -> None:
    steady = steady_state([step(number, 10 * number, 10 * number + 9, running=1, gap_ms=1.0, mode=Mode.OFF) for number in range(4)], 1)
    assert steady is not None
    figures = summarise([Run(steady, 1.0)])
    assert figures.tokens_per_second == pytest.approx(100.0)
    assert {figures.draft_ms, figures.hidden_share, figures.drafted, figures.accepted, figures.acceptance_length, figures.wait_ms} == {None}


def test_a_draft_cut_to_nothing_is_a_visit() -> None:
    """Four requests, of which two are verified with three tokens each."""
    records = [step(number, 10 * number, 10 * number + 9, running=4, generated=8, drafts=[(3, 3), (3, 1)]) for number in range(4)]
    steady = steady_state(records, 4)
    assert steady is not None
    figures = summarise([Run(steady, 1.0)])
    assert figures.acceptance_length == pytest.approx(1 + 4 / 4)
    assert figures.verified_length == pytest.approx(6 / 4)


def test_drafting_ahead_counts_as_drafting() -> None:
    records: list[Record] = []
    for number in range(4):
        ahead = LookaheadRecord(START + 10_000 * number, START + 10_000 * number + 6_000, 6_000, hits=1, misses=3, discarded=15)
        records += [
            order(number, 10 * number + 6, 10 * number + 8, 0),
            ahead,
            step(number, 10 * number, 10 * number + 9, running=1, drafts=[(4, 2)], mode=Mode.PEARL),
        ]
    figures = summarise([Run(steady_of_one(records), 1.0)])
    assert figures.hidden_share == pytest.approx(0.75)
    assert figures.draft_ms == pytest.approx(2.0)
    assert figures.lookahead_hits == pytest.approx(0.25)


def test_passes_beside_drafting_ahead_are_told_from_the_others() -> None:
    """The drafter goes ahead beside every second pass, which takes 12 ms where the others take 9."""
    records: list[Record] = []
    for number in range(9):
        start, took = 20 * number, 12 if number % 2 else 9
        records.append(step(number, start, start + took, running=1, drafts=[(4, 2)], mode=Mode.PEARL))
        if number % 2:
            first = START + 1000 * (start + 2)
            records.append(LookaheadRecord(first, first + 6000, 6000, hits=0, misses=1, discarded=5))
        else:
            # Only what became of earlier tokens was told, as by a drafter that rested since.
            records.append(LookaheadRecord(0, 0, 0, hits=0, misses=1, discarded=5))
    figures = summarise([Run(steady_of_one(records), 1.0)])
    assert (figures.verify_beside_ms, figures.verify_alone_ms) == (12.0, 9.0)
    sequential = summarise([Run(steady_of(sequential_run()), 1.0)])
    assert (sequential.verify_beside_ms, sequential.verify_alone_ms) == (None, None)


def steady_of_one(records: Sequence[Record]) -> Steady:
    steady = steady_state(records, 1)
    assert steady is not None
    return steady
