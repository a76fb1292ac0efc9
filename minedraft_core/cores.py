"""CPU cores: how they are written, and how target and drafter share them out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from minedraft_core.config import ConfigError

_PART = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


@dataclass(frozen=True)
class Cores:
    """CPU cores of the target and of the drafter; empty where the choice is the system's."""

    target: tuple[int, ...]
    drafter: tuple[int, ...]


NO_CORES = Cores((), ())


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers from a list such as `0-3,8`. Raises ValueError for anything else."""
    cores: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is neither a core nor a range of cores; give a list such as 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part!r} runs backwards")
        cores.extend(range(first, last + 1))
    if len(set(cores)) != len(cores):
        raise ValueError("a core is named twice")
    return tuple(cores)


def check_cores(named: Cores, available: Sequence[int]) -> None:
    """Raise ConfigError where cores are shared or not there."""
    for flag, cores in (("--target-cores", named.target), ("--drafter-cores", named.drafter)):
        if missing := sorted(set(cores) - set(available)):
            raise ConfigError(f"{flag}: this process may not use {missing}; allowed: {list(available)}")
    if shared := sorted(set(named.target) & set(named.drafter)):
        raise ConfigError(f"--target-cores and --drafter-cores share {shared}; each core is for one of them")


def split_cores(named: Cores, available: Sequence[int]) -> Cores:
    """Cores for both, none shared: where none is named the drafter gets the last, the target all others; none where there is only one.

    Raises ConfigError where cores are shared or not there.
    """
    check_cores(named, available)
    free = tuple(core for core in available if core not in {*named.target, *named.drafter})
    if not named.target and not named.drafter:
        return Cores(free[:-1], free[-1:]) if len(free) > 1 else NO_CORES
    return Cores(named.target or free, named.drafter or free)
