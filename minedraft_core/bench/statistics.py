"""From an engine's records to the figures of a row. Pure functions.

The steady state of a run begins with the first pass after its last prompt run by whose end every side had its turn, and ends with the last
pass after which all requests still run. The first pass only marks the beginning: it may have waited for the drafter to read the prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from minedraft_core.types import DraftRecord, LookaheadRecord, Record, Span, StepRecord

_US = 1e-6


@dataclass(frozen=True)
class Steady:
    """The steady state of one run: passes of the target, the orders answered for them, what was drafted ahead, and the time of all."""

    steps: tuple[StepRecord, ...]
    orders: tuple[DraftRecord, ...]
    ahead: tuple[LookaheadRecord, ...]
    span: Span

    @property
    def tokens_per_second(self) -> float:
        """Tokens delivered by the passes over the time from the end of the pass before them to the end of the last."""
        return sum(step.generated_num for step in self.steps) / (self.span.duration_us * _US)


@dataclass(frozen=True)
class Run:
    """One run of equal requests. `whole` is all tokens over the time from the first request to the last token, per second."""

    steady: Steady
    whole: float


@dataclass(frozen=True)
class Figures:
    """The figures of a row; what does not apply is None. Times are milliseconds."""

    tokens_per_second: float
    tokens_per_second_whole: float
    tokens_per_second_runs: tuple[float, ...]
    steps: int
    verify_ms: float
    draft_ms: float | None
    gap_ms: float | None
    wait_ms: float | None
    overhead_ms: float
    hidden_share: float | None
    drafted: int | None
    accepted: int | None
    acceptance_length: float | None
    verified_length: float | None = None
    lookahead_hits: float | None = None
    verify_beside_ms: float | None = None
    verify_alone_ms: float | None = None


def steady_state(records: Sequence[Record], concurrency: int) -> Steady | None:
    """The steady state in the records of one run, None where the run was too short to have one."""
    series = _longest_series(records, concurrency)
    if not series:
        return None
    steps = [step for _, step in series]
    sides = 2 if all(step.is_parallelised for step in steps) else 1
    rounds = len(steps) // sides - 1
    if rounds < 1:
        return None
    first, last = sides - 1, sides - 1 + rounds * sides
    between = records[series[first][0] : series[last][0]]
    orders = tuple(record for record in between if isinstance(record, DraftRecord) and record.drafted_per_position)
    ahead = tuple(record for record in between if isinstance(record, LookaheadRecord))
    return Steady(tuple(steps[first + 1 : last + 1]), orders, ahead, Span(steps[first].end_us, steps[last].end_us))


def _longest_series(records: Sequence[Record], concurrency: int) -> list[tuple[int, StepRecord]]:
    longest: list[tuple[int, StepRecord]] = []
    current: list[tuple[int, StepRecord]] = []
    for index, step in enumerate(records):
        if not isinstance(step, StepRecord):
            continue
        if step.is_prompt_run or sum(step.side_requests) != concurrency:
            current = []
            continue
        current.append((index, step))
        if len(current) >= len(longest):
            longest = current
    return longest


def summarise(runs: Sequence[Run]) -> Figures:
    """The figures of several runs: throughputs are medians over runs, times over all passes or orders; shares come from sums."""
    steps = [step for run in runs for step in run.steady.steps]
    orders = [order for run in runs for order in run.steady.orders]
    ahead = [record for run in runs for record in run.steady.ahead]
    # A request whose draft was cut to nothing was visited too.
    visits = sum(step.batched_requests for step in steps if step.verify_len)
    drafted, accepted = sum(step.verify_len for step in steps), sum(step.accepted_num for step in steps)
    drafting: list[DraftRecord | LookaheadRecord] = [*orders, *ahead]
    busy = sum(record.end_us - record.start_us for record in drafting)
    foreseen = sum(record.hits + record.misses for record in ahead)
    rates = tuple(run.steady.tokens_per_second for run in runs)
    draft_ms = _median_ms(order.end_us - order.start_us for order in orders)
    verify_ms = _median_ms(step.end_us - step.start_us for step in steps)
    assert verify_ms is not None
    beside, alone = _split_by_lookahead(runs)
    return Figures(
        tokens_per_second=median(rates),
        tokens_per_second_whole=median(run.whole for run in runs),
        tokens_per_second_runs=rates,
        steps=len(steps),
        verify_ms=verify_ms,
        draft_ms=draft_ms,
        gap_ms=_median_ms(step.gap_us for step in steps if step.gap_us is not None),
        wait_ms=_median_ms(step.drafter_wait_us for step in steps if step.drafter_wait_us is not None),
        overhead_ms=median(step.measured_overhead_time for step in steps) * 1000,
        hidden_share=sum(record.hidden_us for record in drafting) / busy if busy else None,
        drafted=drafted if visits else None,
        accepted=accepted if visits else None,
        acceptance_length=1 + accepted / visits if visits else None,
        verified_length=drafted / visits if visits else None,
        lookahead_hits=sum(record.hits for record in ahead) / foreseen if foreseen else None,
        verify_beside_ms=_median_ms(beside),
        verify_alone_ms=_median_ms(alone),
    )


def _split_by_lookahead(runs: Sequence[Run]) -> tuple[list[int], list[int]]:
    """Durations of the passes beside which the drafter went ahead, and of the others, where it did go ahead at all; in microseconds."""
    beside: list[int] = []
    alone: list[int] = []
    if not any(run.steady.ahead for run in runs):
        return beside, alone
    for run in runs:
        # What was drafted ahead beside the last pass is told after the steady state.
        for step in run.steady.steps[:-1]:
            overlaps = any(ahead.start_us < step.end_us and step.start_us < ahead.end_us for ahead in run.steady.ahead)
            (beside if overlaps else alone).append(step.end_us - step.start_us)
    return beside, alone


def _median_ms(times_us: Iterable[int]) -> float | None:
    times = list(times_us)
    return median(times) / 1000 if times else None
