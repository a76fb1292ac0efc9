"""What one API key may use at a time and per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import APIError

_MINUTE = 60.0


@dataclass(slots=True)
class Bucket:
    """Requests that a key may still make: `capacity` at most, growing by as many a minute."""

    capacity: int
    level: float
    at: float

    def take(self, now: float) -> float:
        """Take one request at `now` (seconds). 0 if there was one, else the seconds until there is."""
        self.level = min(self.capacity, self.level + (now - self.at) * self.capacity / _MINUTE)
        self.at = now
        if self.level < 1:
            return (1 - self.level) * _MINUTE / self.capacity
        self.level -= 1
        return 0.0


class KeyLimits:
    """Refuses requests of a key beyond its limits (429); a limit of None sets none. Only requests that generate count.

    Needs the key that `ApiKeys` found.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        concurrent: int | None,
        per_minute: int | None,
        paths: frozenset[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._concurrent = concurrent
        self._per_minute = per_minute
        self._paths = paths
        self._clock = clock
        self._running: dict[int, int] = {}
        self._buckets: dict[int, Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        key: int = scope["state"]["api_key"]
        refusal = self._refusal(key)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        self._running[key] = self._running.get(key, 0) + 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[key] -= 1

    def _refusal(self, key: int) -> APIError | None:
        if self._concurrent is not None and self._running.get(key, 0) >= self._concurrent:
            return _too_many(f"this key already has {self._concurrent} requests running; wait for one to end", 1)
        if self._per_minute is None:
            return None
        now = self._clock()
        bucket = self._buckets.setdefault(key, Bucket(self._per_minute, self._per_minute, now))
        wait = bucket.take(now)
        if wait:
            return _too_many(f"this key may make {self._per_minute} requests a minute; try again later", math.ceil(wait))
        return None


def _too_many(message: str, seconds: int) -> APIError:
    return APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})
