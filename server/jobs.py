"""A request as the engine sees it, whatever endpoint it came through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.prompts import Prompt
from server.sampling import ServingParams


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready to run. Choice c of prompt p has the index p * n + c and is one engine request.

    `reasoning` are the arguments of `generate` that tell the engine where the reasoning of a constrained request ends.
    """

    id: str
    prompts: Sequence[Prompt]
    n: int
    params: ServingParams
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    reasoning: Mapping[str, Any] = field(default_factory=dict)
    include_usage: bool = False
    running_usage: bool = False
    speculation_metrics: bool = False

    def __len__(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of one choice."""
        return self.prompts[index // self.n]

    def engine_id(self, index: int) -> str:
        """The engine's id of one choice."""
        return f"{self.id}-{index}"


@dataclass(slots=True)
class Tally:
    """Tokens of a request so far, for the access log."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
