"""What the draft process does with an order: bring contexts up to date, catch up on the KV cache, draft k tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minedraft_core.types import DraftBatch, DraftResult, Span, now_us
from minedraft_core.vllm.cpu.contexts import DraftContext, DraftContexts
from minedraft_core.vllm.cpu.model import Query
from minedraft_core.vllm.cpu.noise import Draw

_TOKENS_A_PASS = 2048


class LanguageModel(Protocol):
    """What drafting needs of a model."""

    def run(self, queries: Sequence[Query]) -> None:
        """Fill the KV cache."""
        ...

    def choose(self, queries: Sequence[Query], draws: Sequence[Draw | None]) -> list[int]:
        """Run the queries and give the token after each one: the most likely, or drawn."""
        ...


class DraftLoop:
    """Answers orders with the continuation of each context: the most likely one, or drawn with the noise that the target will use."""

    def __init__(self, model: LanguageModel, contexts: DraftContexts) -> None:
        self._model, self._contexts = model, contexts

    def answer(self, batch: DraftBatch, superseded: frozenset[str] = frozenset()) -> DraftResult:
        """Draft for the order's items. Requests in `superseded` are only brought up to date: a later order asks for them again."""
        begin = now_us()
        rows: list[list[int]] = [[] for _ in batch.items]
        work: dict[int, tuple[DraftContext, int]] = {}
        for index, item in enumerate(batch.items):
            context = self._contexts.update(item)
            if item.limit > 0 and item.request_id not in superseded and self._contexts.reserve(context, item.limit):
                work[index] = context, item.limit
        if work:
            contexts = [context for context, _ in work.values()]
            self._catch_up(contexts)
            drafts = self._draft(contexts, max(limit for _, limit in work.values()), [limit for _, limit in work.values()])
            for (index, (context, limit)), row in zip(work.items(), drafts, strict=True):
                context.drafted = rows[index] = row[:limit]
        return DraftResult(batch.round, [item.request_id for item in batch.items], rows, Span(begin, now_us()))

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free requests that ended."""
        for request_id in request_ids:
            self._contexts.forget(request_id)

    def _catch_up(self, contexts: Sequence[DraftContext]) -> None:
        """Run all but the last two tokens of each context that the KV cache lacks, in passes of bounded size."""
        pending = [(context, stop) for context in contexts if context.cached < (stop := len(context.tokens) - 2)]
        while pending:
            room, queries, rest = _TOKENS_A_PASS, [], []
            for context, stop in pending:
                count = min(room, stop - context.cached)
                if count:
                    queries.append(Query(context.tokens[context.cached : context.cached + count], context.cached, context.blocks))
                    context.cached += count
                    room -= count
                if context.cached < stop:
                    rest.append((context, stop))
            self._model.run(queries)
            pending = rest

    def _draft(self, contexts: Sequence[DraftContext], num_tokens: int, limits: Sequence[int]) -> list[list[int]]:
        """k passes. The first runs each context's last two tokens: the KV entry of the one before last may be missing."""
        queries = [Query(context.tokens[-2:], max(0, len(context.tokens) - 2), context.blocks) for context in contexts]
        drafts: list[list[int]] = [[] for _ in contexts]
        active = list(range(len(contexts)))
        for step in range(num_tokens):
            chosen = self._model.choose(queries, [contexts[index].draw(step) for index in active])
            for index, token in zip(active, chosen, strict=True):
                drafts[index].append(token)
            active = [index for index in active if limits[index] > step + 1]
            queries = [Query(drafts[index][-1:], len(contexts[index].tokens) + step, contexts[index].blocks) for index in active]
        for context in contexts:
            context.cached = len(context.tokens)
        return drafts
