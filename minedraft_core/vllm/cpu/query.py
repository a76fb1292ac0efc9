"""What goes into a pass of the draft model, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Query:
    """Tokens of one request to run: `tokens` at positions `start`, `start + 1`, ..., with the request's KV blocks."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class Chosen:
    """A token for each query, and the logarithm of its probability where that is computed."""

    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
