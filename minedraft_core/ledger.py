"""What the drafter has been told about each request and which order of it is open. Bookkeeping only; no effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from minedraft_core.types import Draft, DraftBatch, DraftItem, DraftResult, Sampling


@dataclass(frozen=True)
class Context:
    """A request's whole context, prompt and output, which only ever grows, how many further tokens are of use, and how they are drawn."""

    tokens: Sequence[int]
    limit: int
    sampling: Sampling | None = None


@dataclass
class DraftLedger:
    """Orders to one drafter. An answer counts only for requests whose open order has its round; all others are late."""

    _told: dict[str, int] = field(default_factory=dict)
    _open: dict[str, int] = field(default_factory=dict)
    _round: int = 0

    def order(self, contexts: Mapping[str, Context], num_tokens: int, ahead: int = 0) -> DraftBatch:
        """An order for these requests, with so many tokens to draft ahead afterwards."""
        self._round += 1
        items = []
        for request_id, context in contexts.items():
            base = self._told.get(request_id, 0)
            items.append(DraftItem(request_id, base, list(context.tokens[base:]), min(context.limit, num_tokens), context.sampling))
            self._told[request_id] = len(context.tokens)
            self._open[request_id] = self._round
        return DraftBatch(self._round, num_tokens, items, ahead)

    def settle(self, result: DraftResult) -> tuple[dict[str, Draft], int]:
        """Take an answer: the drafts of the requests that wait for it, and how many tokens came too late to be used."""
        drafts: dict[str, Draft] = {}
        late = 0
        logprobs = result.logprobs or [[]] * len(result.tokens)
        for request_id, tokens, scores in zip(result.request_ids, result.tokens, logprobs, strict=True):
            if self._open.get(request_id) == result.round:
                del self._open[request_id]
                drafts[request_id] = Draft(tokens, scores)
            else:
                late += len(tokens)
        return drafts, late

    def waiting(self, request_ids: Iterable[str]) -> set[str]:
        """Those of the requests that have an open order."""
        return self._open.keys() & set(request_ids)

    def give_up(self, request_ids: Iterable[str]) -> None:
        """Close the orders of these requests: what still comes for them is late."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def forget(self, request_id: str) -> bool:
        """Drop a request; True where the drafter knows it and has to be told."""
        self._open.pop(request_id, None)
        return self._told.pop(request_id, None) is not None

    def reset(self) -> None:
        """The drafter lost everything it knew."""
        self._told.clear()
        self._open.clear()
