"""Which arm to use at which load. Pure functions.

Arms are compared at the same number of running requests, for the same models, prompts and samples; plain decoding stands beside every
drafter. An arm whose runs brought no token is left out. Of each mode the best k counts. A lead is clear where every run of the best arm is
faster than every run of every other mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from minedraft_core.report.arms import MeasuredArm, group_of, model_name

OFF = "off"


@dataclass(frozen=True)
class Choice:
    """The best arm at one load by tokens per second, and the best per GPU where there are GPUs.

    `over_off` and `over_next` are ratios of tokens per second, None where there is nothing to compare with. `rivals` are the best arms of
    other modes of which some run was as fast as some run of the best. `rates` holds the best tokens per second of each mode.
    """

    target: str
    draft: str
    acceptance: str
    dataset: str
    n: int
    load: int
    best: MeasuredArm
    rivals: tuple[MeasuredArm, ...]
    over_off: float | None
    over_next: float | None
    best_per_gpu: MeasuredArm | None
    rates: Mapping[str, float]

    @property
    def words(self) -> str:
        """What to use, in a few words."""
        if self.over_next is None:
            return f"{self.best.label} (nothing to compare with)"
        if self.rivals:
            return f"{' or '.join(arm.label for arm in (self.best, *self.rivals))}: no clear difference"
        return self.best.label


def choices(arms: Sequence[MeasuredArm]) -> list[Choice]:
    """A choice for each group of arms and load that has been measured."""
    usable = [arm for arm in arms if arm.figures.tokens_per_second]
    drafting = sorted((arm for arm in usable if arm.header.draft), key=_key)
    found: list[Choice] = []
    for key, members in groupby(drafting, key=_key):
        target, draft, acceptance, dataset, n = key
        group = list(members)
        group += [arm for arm in usable if not arm.header.draft and group_of(arm.header) == (target, "", "", dataset, n)]
        found += [
            _choose([arm for arm in group if arm.header.load == load], target, draft, acceptance, dataset, n, load)
            for load in sorted({arm.header.load for arm in group})
        ]
    return found


def _key(arm: MeasuredArm) -> tuple[str, str, str, str, int]:
    return group_of(arm.header)


def _choose(arms: Sequence[MeasuredArm], target: str, draft: str, acceptance: str, dataset: str, n: int, load: int) -> Choice:
    best_of_modes = _best_of_modes(arms, _rate)
    best, *others = sorted(best_of_modes.values(), key=_rate, reverse=True)
    off = best_of_modes.get(OFF)
    return Choice(
        target=target,
        draft=draft,
        acceptance=acceptance,
        dataset=dataset,
        n=n,
        load=load,
        best=best,
        rivals=tuple(arm for arm in others if max(arm.figures.tokens_per_second_runs) >= min(best.figures.tokens_per_second_runs)),
        over_off=_rate(best) / _rate(off) if off is not None else None,
        over_next=_rate(best) / _rate(others[0]) if others else None,
        best_per_gpu=max((arm for arm in arms if arm.header.gpus), key=_rate_per_gpu, default=None),
        rates={mode: _rate(arm) for mode, arm in best_of_modes.items()},
    )


def _best_of_modes(arms: Iterable[MeasuredArm], rate: Callable[[MeasuredArm], float]) -> dict[str, MeasuredArm]:
    best: dict[str, MeasuredArm] = {}
    for arm in arms:
        known = best.get(arm.header.arm)
        if known is None or rate(arm) > rate(known):
            best[arm.header.arm] = arm
    return best


def _rate(arm: MeasuredArm) -> float:
    return arm.figures.tokens_per_second or 0.0


def _rate_per_gpu(arm: MeasuredArm) -> float:
    return arm.figures.tokens_per_second_per_gpu or 0.0


def advice(found: Sequence[Choice]) -> list[str]:
    """One sentence for each group: the mode to use, load by load, neighbours with the same answer taken together."""
    sentences = []
    for (target, draft, acceptance, dataset, n), members in groupby(
        found, key=lambda choice: (choice.target, choice.draft, choice.acceptance, choice.dataset, choice.n)
    ):
        parts = []
        for mode, same in groupby(members, key=_advised):
            loads = [str(choice.load) for choice in same]
            parts.append(f"{mode} at {', '.join(loads)}")
        about = f"{model_name(target)} with {model_name(draft)}"
        details = ", ".join(filter(None, (acceptance, dataset, f"{n} samples a prompt" if n > 1 else "")))
        sentences.append(f"{about}{f' ({details})' if details else ''}, by running requests: {'; '.join(parts)}.")
    return sentences


def _advised(choice: Choice) -> str:
    # Modes that are equally fast are one answer, whichever came first.
    return " or ".join(sorted(arm.header.arm for arm in (choice.best, *choice.rivals)))
