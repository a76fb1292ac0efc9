"""All processes of a job: those of its group, and those that left the group but bear its mark in their environment.

As a command this is the runner's guard: `python tests/gpu/family.py RUN` reads the numbers of groups, one a line, until its input ends,
which it does too when the runner is killed; then it kills what is left of them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

MARK = "GPU_JOB"
"""The variable that every process of a job inherits: the run, a slash, the job."""
_PAUSE_SECONDS = 0.05


def members(groups: Collection[int], mark: str) -> list[int]:
    """The processes that are in one of the groups, or whose mark begins with `mark`, without those that have ended."""
    # A process that renames itself writes over its environment, so neither sign alone is enough.
    sign = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if state != "Z" and (int(group) in groups or _has(folder / "environ", sign)):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _has(environment: Path, sign: bytes) -> bool:
    try:
        return any(entry.startswith(sign) for entry in environment.read_bytes().split(b"\0"))
    except PermissionError:
        return False


def kill(groups: Collection[int], mark: str) -> None:
    """Kill them all, and those that they start meanwhile."""
    while found := members(groups, mark):
        for number in found:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_PAUSE_SECONDS)


def main() -> None:
    """Wait for the runner's end, then kill what it left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = {int(line) for line in sys.stdin}
    kill(groups, f"{sys.argv[1]}/")


if __name__ == "__main__":
    main()
