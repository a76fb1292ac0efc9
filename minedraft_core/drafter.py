"""The drafter as the pipeline sees it: one interface, and a fake that answers in the same process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from minedraft_core.types import DraftBatch, DraftResult, Span, now_us

DRAFT_VOCABULARY = "draft_vocab.safetensors"
"""File beside a draft model's weights that names the tokens it proposes: `token_ids`, int64 [m], ascending. Optional."""


class DrafterError(Exception):
    """The drafter died, hung or answered nonsense. `reason` is one word for metrics, the message says what happened."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Drafter(Protocol):
    """A draft model on a device of its own. Every method may raise DrafterError; none blocks longer than it says."""

    def ready(self) -> bool:
        """Whether the model is loaded. Never waits."""
        ...

    def start(self, batch: DraftBatch) -> None:
        """Take an order. Orders are answered in turn, each exactly once; never waits for an answer."""
        ...

    def collect(self, timeout: float) -> list[DraftResult]:
        """The answers that are here; waits up to `timeout` seconds for the first one."""
        ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free what is kept for requests that ended."""
        ...

    def close(self) -> None:
        """End the drafter and free its device. Idempotent, never raises."""
        ...


class InlineDrafter:
    """Answers each order at once with `propose(context, num_tokens)`; keeps every context. For tests and for drafters without a model."""

    def __init__(self, propose: Callable[[list[int], int], list[int]]) -> None:
        self._propose = propose
        self._contexts: dict[str, list[int]] = {}
        self._answers: list[DraftResult] = []

    def ready(self) -> bool:
        """Always."""
        return True

    def start(self, batch: DraftBatch) -> None:
        """Draft for each item now."""
        begin = now_us()
        rows = []
        for item in batch.items:
            context = self._contexts.setdefault(item.request_id, [])
            if len(context) != item.base:
                raise DrafterError("rubbish", f"request {item.request_id}: told {item.base} tokens, know {len(context)}")
            context.extend(item.tokens)
            rows.append(self._propose(context, item.limit))
        self._answers.append(DraftResult(batch.round, [item.request_id for item in batch.items], rows, Span(begin, now_us())))

    def collect(self, timeout: float) -> list[DraftResult]:
        """All answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the contexts."""
        for request_id in request_ids:
            self._contexts.pop(request_id, None)

    def close(self) -> None:
        """Nothing to end."""
