"""Locust's load shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from locust import LoadTestShape

from loadtest.plan import Stage


class StagedShape(LoadTestShape):
    """One number of users after another; new ones come at the spawn rate."""

    def __init__(self, stages: Sequence[Stage], spawn_rate: float) -> None:
        super().__init__()
        self._stages = stages
        self._ends = list(accumulate(stage.seconds for stage in stages))
        self._spawn_rate = spawn_rate

    def tick(self) -> tuple[int, float] | None:
        """Users and spawn rate now; None when the last stage is over."""
        now = self.get_run_time()
        for stage, end in zip(self._stages, self._ends, strict=True):
            if now < end:
                return stage.users, self._spawn_rate
        return None
