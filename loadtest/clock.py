"""One clock for all that a process measures."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the epoch that never jump: the system's time when this was made, and the time that has gone by since."""

    def __init__(self) -> None:
        self._start = time.time() - time.perf_counter()

    def now(self) -> float:
        """The time."""
        return self._start + time.perf_counter()
