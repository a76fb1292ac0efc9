"""A clock that stands still until told, a drafter that follows a script, and sample records."""

from __future__ import annotations

from dataclasses import dataclass, field

from minedraft_core.drafter import DrafterError
from minedraft_core.types import DraftResult, Mode, Span, StepRecord


class Clock:
    """Seconds, moved by hand."""

    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return self.now


@dataclass
class ScriptedDrafter:
    """Answers each order `latency` seconds after it is done with the one before; waiting moves the clock.

    `faults` maps a method's name to the fault it raises. `edit` may change an answer. `known` is what a real drafter would know.
    """

    clock: Clock
    latency: float = 0.0
    load_time: float = 0.0
    faults: dict[str, DrafterError] = field(default_factory=dict)
    edit: object = None
    orders: list = field(default_factory=list)
    waits: list = field(default_factory=list)
    forgotten: list = field(default_factory=list)
    closed: int = 0
    known: dict = field(default_factory=dict)

    def __post_init__(self):
        self._due = []
        self._loaded_at = self.clock.now + self.load_time

    def _raise(self, method):
        if method in self.faults:
            raise self.faults[method]

    def ready(self):
        self._raise("ready")
        if self.clock.now < self._loaded_at:
            self.clock.now = min(self._loaded_at, self.clock.now + 1.0)
            return False
        return True

    def start(self, batch):
        self._raise("start")
        self.orders.append(batch)
        rows = []
        for item in batch.items:
            assert item.base == len(self.known.setdefault(item.request_id, []))
            self.known[item.request_id] += item.tokens
            rows.append([(sum(self.known[item.request_id]) + step) % 100 for step in range(item.limit)])
        answer = DraftResult(batch.round, [item.request_id for item in batch.items], rows, Span(0, round(self.latency * 1e6)))
        begin = max([self.clock.now, *(due for due, _ in self._due)])
        self._due.append((begin + self.latency, answer if self.edit is None else self.edit(answer)))

    def collect(self, timeout):
        self._raise("collect")
        self.waits.append(timeout)
        first = min((due for due, _ in self._due), default=float("inf"))
        if first > self.clock.now:
            self.clock.now = min(first, self.clock.now + timeout)
        arrived = [answer for due, answer in self._due if due <= self.clock.now]
        self._due = [(due, answer) for due, answer in self._due if due > self.clock.now]
        return arrived

    def forget(self, request_ids):
        self._raise("forget")
        self.forgotten += request_ids
        for request_id in request_ids:
            self.known.pop(request_id, None)

    def close(self):
        self.closed += 1


def step_record(**changes):
    """A step of two sides, with these fields changed."""
    fields = {
        "step": 1,
        "start_us": 10,
        "end_us": 30,
        "mode": Mode.PARALLEL,
        "side": 0,
        "is_prompt_run": False,
        "is_parallelised": True,
        "batched_requests": 2,
        "preempted_requests": 0,
        "batched_token_num": 10,
        "proposed_len": 8,
        "verify_len": 7,
        "accepted_num": 3,
        "generated_num": 5,
        "measured_draft_time": 0.25,
        "measured_target_time": 0.5,
        "measured_overhead_time": 0.125,
        "gap_us": None,
        "num_speculative_tokens": 4,
        "side_requests": (2, 2),
        "drafter_wait_us": 40,
        "drafts": [(4, 3), (3, 0)],
        "dropped": {"late": 2},
        "fallback_reason": "late",
    }
    return StepRecord(**{**fields, **changes})
