"""Takes in what was seen of each request: fires Locust's events and keeps the samples."""

from __future__ import annotations

from typing import Any

import gevent
from locust.env import Environment

from loadtest.clock import Clock
from loadtest.plan import Plan
from loadtest.requests import PATHS
from loadtest.sample import Outcome, Sample


class MissedError(Exception):
    """A limit that a request did not keep."""


class FailedError(Exception):
    """Why a request failed; requests with the same reason are one line in Locust's tables."""


class Recorder:
    """The samples of the test that runs or ran last."""

    def __init__(self, environment: Environment, plan: Plan, clock: Clock) -> None:
        self._environment = environment
        self._plan = plan
        self._clock = clock
        self._counts_from = 0.0
        self._reset: gevent.Greenlet | None = None
        self.samples: list[Sample] = []
        self.overloaded = False
        """Whether the load generator itself was short of CPU, so that its times are not to be trusted."""
        self.most_users = 0
        self.started = False
        events = environment.events
        events.test_start.add_listener(self._begin)
        events.test_stop.add_listener(self._end)
        events.cpu_warning.add_listener(self._note_load)
        events.spawning_complete.add_listener(self._note_users)

    def add(self, sample: Sample) -> None:
        """Take in one request; one that began in the warm-up leaves no trace."""
        if sample.begin < self._counts_from:
            return
        self.samples.append(sample)
        path = PATHS[sample.endpoint]
        end = sample.end * 1000
        match sample.outcome:
            case Outcome.DONE:
                self._fire("POST", path, end)
                self._fire("tokens/s", path, sample.tokens_per_second, length=sample.completion_tokens)
                for name, seconds in (("TTFT", sample.first), ("TPOT", sample.tpot), ("ITL", sample.gap)):
                    if seconds is not None:
                        self._fire(name, path, seconds * 1000)
            case Outcome.FAILED:
                self._fire("POST", path, end, FailedError(sample.error or ""))
            case Outcome.ABORTED:
                self._fire("ABORT", path, end)
                return
            case Outcome.CUT:
                return
        verdicts = sample.verdicts(self._plan.limits)
        for name, limit in self._plan.limits.named().items():
            self._fire("SLO", f"{name} <= {limit:g} ms", end, None if verdicts[name] else MissedError("missed"))
        if verdicts:
            self._fire("SLO", "all", end, None if all(verdicts.values()) else MissedError("missed"))

    def _fire(self, kind: str, name: str, value: float, fault: Exception | None = None, length: int = 0) -> None:
        self._environment.events.request.fire(
            request_type=kind, name=name, response_time=value, response_length=length, exception=fault, context={}
        )

    def _begin(self, **_: Any) -> None:
        self.samples.clear()
        self.overloaded = False
        self.most_users = 0
        self.started = True
        self._counts_from = self._clock.now() + self._plan.warmup
        if self._plan.warmup:
            self._reset = gevent.spawn_later(self._plan.warmup, self._environment.stats.reset_all)

    def _end(self, **_: Any) -> None:
        if self._reset is not None:
            self._reset.kill()

    def _note_load(self, **_: Any) -> None:
        self.overloaded = True

    def _note_users(self, user_count: int, **_: Any) -> None:
        self.most_users = max(self.most_users, user_count)
