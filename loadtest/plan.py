"""What a load test is to do: validated once, frozen."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Endpoint = Literal["completions", "chat"]


class Range(msgspec.Struct, frozen=True):
    """Whole numbers from `least` to `most`, both included, equally likely."""

    least: int
    most: int


class Stage(msgspec.Struct, frozen=True):
    """So many users for so many seconds."""

    users: int
    seconds: float


class Limits(msgspec.Struct, frozen=True):
    """What a request has to keep, in milliseconds; None sets no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def named(self) -> dict[str, float]:
        """The limits that are set, by the name of what they limit."""
        limits = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}


class Demands(msgspec.Struct, frozen=True):
    """What the whole test has to keep for exit code 0."""

    slo_share: float
    """Least share of the requests that keep every limit; failed ones keep none."""
    error_share: float
    """Largest share of the requests that may fail."""


class Plan(msgspec.Struct, frozen=True):
    """The whole load test, but for users, spawn rate and run time, which Locust keeps."""

    endpoints: tuple[Endpoint, ...]
    arrivals: Literal["closed", "poisson"]
    rate: float
    """Requests a second of each user, with `arrivals` poisson."""
    stages: tuple[Stage, ...]
    model: str | None
    prompts: str
    input_tokens: Range | None
    """Lengths of random prompts, which then stand in for the file."""
    max_tokens: Range
    body: dict[str, Any]
    """Further fields of every request."""
    warmup: float
    """Seconds at the beginning whose requests are not counted."""
    limits: Limits
    demands: Demands
    abort_share: float
    """Share of the requests whose client goes away early."""
    abort_after: int
    """Deliveries of tokens after which it does."""
    gpus: int
    """GPUs that the server uses; 0 where it uses none."""
    timeout: float
    """Seconds without a byte after which a request counts as failed."""
    insecure: bool
    """Whether any certificate will do."""
    seed: int
    label: str
