"""The requests of a load test: what each one sends, and whether its client leaves early."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from loadtest.plan import Endpoint, Plan, Range
from loadtest.prompts import synthetic

PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Request:
    """One request. `leave_after` is the number of deliveries after which its client goes away, None for one that stays."""

    endpoint: Endpoint
    body: bytes
    leave_after: int | None

    @property
    def path(self) -> str:
        """Where it is sent."""
        return PATHS[self.endpoint]


class Requests:
    """Makes the requests of one test. What is drawn depends on the seed and on the requests made before."""

    def __init__(self, plan: Plan, model: str, prompts: Iterator[str]) -> None:
        self._plan = plan
        self._model = model
        self._prompts = prompts
        self._draws = random.Random(plan.seed)

    def make(self, endpoint: Endpoint) -> Request:
        """The next request to an endpoint."""
        plan = self._plan
        prompt = next(self._prompts) if plan.input_tokens is None else synthetic(self._draw(plan.input_tokens), endpoint, self._draws)
        asked: dict[str, Any] = {"prompt": prompt} if endpoint == "completions" else {"messages": [{"role": "user", "content": prompt}]}
        body = {
            "model": self._model,
            **asked,
            "max_tokens": self._draw(plan.max_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
            **plan.body,
        }
        leaves = self._draws.random() < plan.abort_share
        return Request(endpoint, msgspec.json.encode(body), plan.abort_after if leaves else None)

    def draw_seed(self) -> int:
        """A seed for one user's own draws."""
        return self._draws.getrandbits(64)

    def _draw(self, lengths: Range) -> int:
        return self._draws.randint(lengths.least, lengths.most)
