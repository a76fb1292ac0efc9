"""An arm with its trace and its figures, and the words for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minedraft_core.report.figures import Figures, figures_of
from minedraft_core.report.trace import Trace
from minedraft_core.trace import RunHeader

_STEADY = 1.25


@dataclass(frozen=True)
class MeasuredArm:
    """One file of a report."""

    trace: Trace
    figures: Figures

    @property
    def header(self) -> RunHeader:
        """What it was measured with."""
        return self.trace.header

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is not right with the file, what it does not tell, and whether its runs agree."""
        rates = self.figures.tokens_per_second_runs
        doubts: tuple[str, ...] = ()
        if rates and min(rates) == 0:
            doubts = ("a run brought no token: its throughput is 0",)
        elif len(rates) > 1 and (apart := max(rates) / min(rates)) > _STEADY:
            doubts = (f"its fastest run is {apart:.1f} times as fast as its slowest: measure again on a quiet machine",)
        return (*self.trace.remarks, *self.figures.missing, *doubts)

    @property
    def label(self) -> str:
        """The arm with what was chosen for it: `parallel k=3`."""
        return arm_label(self.header)


def measured(traces: Iterable[Trace]) -> list[MeasuredArm]:
    """Every trace with its figures, sorted as tables show them."""
    arms = [MeasuredArm(trace, figures_of(trace)) for trace in traces]
    return sorted(arms, key=lambda arm: (*group_of(arm.header), arm.header.load, arm.header.arm, arm.header.k, arm.header.extra))


def arm_label(header: RunHeader) -> str:
    """Mode, draft tokens and, with TETRIS, the extra ones."""
    drafts = f" k={header.k}" if header.k else ""
    return f"{header.arm}{drafts}{f'+{header.extra}' if header.extra else ''}"


def group_of(header: RunHeader) -> tuple[str, str, str, str, int]:
    """What has to be equal for two arms to be compared, as they are sorted: target, drafter, how drafts were judged, prompts, samples."""
    return (header.target, header.draft or "", header.acceptance or "", header.dataset or "", header.n)


def model_name(model: str | None) -> str:
    """The last part of a name or folder."""
    return "" if model is None else model.rstrip("/").rpartition("/")[2]
