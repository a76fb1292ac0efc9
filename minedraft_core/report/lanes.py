"""What target and drafter did at the same time: a short stretch from the middle of a run."""

from __future__ import annotations

from dataclasses import dataclass

from minedraft_core.report.trace import Ahead, Drafted, Run, Step, Trace

_PASSES = 12
_MS = 1e-3


@dataclass(frozen=True)
class Bar:
    """A stretch of time from the beginning of the window, in milliseconds; `side` of a pass is 0 or 1."""

    start_ms: float
    length_ms: float
    side: int = 0
    is_prompt: bool = False


@dataclass(frozen=True)
class Lanes:
    """Bars of both devices in a window of `length_ms`."""

    passes: tuple[Bar, ...]
    drafts: tuple[Bar, ...]
    length_ms: float


def lanes_of(trace: Trace, passes: int = _PASSES) -> Lanes | None:
    """The window around the middle of the last run, None where it has no pass."""
    run = next((run for run in reversed(trace.runs) if run.steps), None)
    if run is None:
        return None
    steps = _window(run, passes)
    begin, end = steps[0].start_us, steps[-1].end_us
    drafting: list[Drafted | Ahead] = [*run.drafted, *run.ahead]
    drafted = [record for record in drafting if record.end_us > begin and record.start_us < end]
    return Lanes(
        tuple(_bar(step.start_us, step.end_us, begin, end, max(0, step.side or 0), is_prompt=step.is_prompt_run) for step in steps),
        tuple(_bar(record.start_us, record.end_us, begin, end) for record in drafted),
        (end - begin) * _MS,
    )


def _window(run: Run, passes: int) -> tuple[Step, ...]:
    first = max(0, (len(run.steps) - passes) // 2)
    return run.steps[first : first + passes]


def _bar(start_us: int, end_us: int, begin_us: int, until_us: int, side: int = 0, *, is_prompt: bool = False) -> Bar:
    start, end = max(start_us, begin_us), min(end_us, until_us)
    return Bar((start - begin_us) * _MS, (end - start) * _MS, side, is_prompt)
