"""What was seen of one request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from loadtest.plan import Endpoint, Limits

_STEP = math.log(1.01)
_SMALLEST = 1e-6


class Outcome(StrEnum):
    """How a request ended: `CUT` is one that was running when the test was stopped."""

    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    CUT = "cut"


class Sample(msgspec.Struct, frozen=True):
    """One request as its client saw it. Times are seconds; `begin` counts from the epoch, all others from `begin`.

    Tokens are the server's own count (`usage`), the one that ends the output included. A delivery is one event of the stream that brings
    tokens; with speculation it can hold several. `gaps` are the times between deliveries, as `bucket_of` names them.
    """

    endpoint: Endpoint
    begin: float
    end: float
    outcome: Outcome
    first: float | None = None
    """When the first token came."""
    last: float | None = None
    """When the last token came, the one that ends the output included."""
    spoken: float = 0.0
    """Time from the first to the last delivery."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    deliveries: int = 0
    gaps: dict[int, int] = {}
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds for a token after the first; None where there is none."""
        if self.first is None or self.last is None or self.completion_tokens < 2:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)

    @property
    def gap(self) -> float | None:
        """Mean seconds between two deliveries; None where there was one."""
        return self.spoken / (self.deliveries - 1) if self.deliveries > 1 else None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time of the request."""
        return self.completion_tokens / self.end

    def verdicts(self, limits: Limits) -> Mapping[str, bool]:
        """Whether each limit that is set was kept. A request that failed, or that brought no token, keeps none."""
        measured = {"ttft": self.first, "tpot": self.tpot or 0.0, "e2e": self.end}
        answered = self.outcome is Outcome.DONE and self.completion_tokens > 0

        def kept(name: str, limit: float) -> bool:
            seconds = measured[name]
            return answered and seconds is not None and seconds * 1000 <= limit

        return {name: kept(name, limit) for name, limit in limits.named().items()}


def bucket_of(seconds: float) -> int:
    """The bucket of a time; each bucket is 1 % wider than the one before it, the first one holds a microsecond and less."""
    return round(math.log(max(seconds, _SMALLEST) / _SMALLEST) / _STEP)


def seconds_of(bucket: int) -> float:
    """The middle of a bucket: within 0.5 % of every time in it."""
    return _SMALLEST * math.exp(bucket * _STEP)
