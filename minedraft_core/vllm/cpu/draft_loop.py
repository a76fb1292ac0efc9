"""What the draft process does with an order: bring contexts up to date, catch up on the KV cache, draft k tokens; then go on ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minedraft_core.types import DraftBatch, DraftResult, Span, now_us
from minedraft_core.vllm.cpu.contexts import DraftContext, DraftContexts
from minedraft_core.vllm.cpu.noise import Draw
from minedraft_core.vllm.cpu.query import Chosen, Query

_TOKENS_A_PASS = 2048


class LanguageModel(Protocol):
    """What drafting needs of a model."""

    def run(self, queries: Sequence[Query]) -> None:
        """Fill the KV cache."""
        ...

    def choose(self, queries: Sequence[Query], draws: Sequence[Draw | None]) -> Chosen:
        """Run the queries and give the token after each one: the most likely, or drawn."""
        ...


class DraftLoop:
    """Answers orders with the continuation of each context: the most likely one, or drawn with the noise that the target will use.

    Every token is a function of the context and that noise. So where all that the target delivered is what the drafter wrote, the rest of
    its chain is the beginning of the next draft, whether it was drafted ahead or drafted and not verified.
    """

    def __init__(self, model: LanguageModel, contexts: DraftContexts) -> None:
        self._model, self._contexts = model, contexts
        self._goals: dict[str, tuple[DraftContext, int]] = {}

    def answer(self, batch: DraftBatch, superseded: frozenset[str] = frozenset()) -> DraftResult:
        """Draft for the order's items. Requests in `superseded` are only brought up to date: a later order asks for them again."""
        begin = now_us()
        rows: list[list[int]] = [[] for _ in batch.items]
        scores: list[list[float]] = [[] for _ in batch.items]
        work: dict[int, tuple[DraftContext, int]] = {}
        for index, item in enumerate(batch.items):
            self._goals.pop(item.request_id, None)
            context = self._contexts.update(item)
            if item.limit > 0 and item.request_id not in superseded and self._contexts.reserve(context, item.limit):
                work[index] = context, item.limit
        self._catch_up([context for context, _ in work.values()])
        self._draft(list(work.values()))
        for index, (context, limit) in work.items():
            rows[index], scores[index] = context.chain[:limit], context.logprobs[:limit]
            context.given = limit if batch.ahead else 0
        if batch.ahead and self._contexts.chances.worth(context.sureness for context, _ in work.values()):
            for index, (context, limit) in work.items():
                if self._contexts.reserve(context, limit + batch.ahead):
                    self._goals[batch.items[index].request_id] = context, limit + batch.ahead
        return DraftResult(
            batch.round,
            [item.request_id for item in batch.items],
            rows,
            Span(begin, now_us()),
            logprobs=scores if any(scores) else None,
            lookahead=self._contexts.tally.take(),
        )

    def look_ahead(self) -> bool:
        """Draft one token ahead for every request that wants more; False where none does."""
        contexts = [context for context, goal in self._goals.values() if len(context.chain) < goal]
        if not contexts:
            return False
        begin = now_us()
        self._advance(contexts)
        for context in contexts:
            context.ahead += 1
        self._contexts.tally.work(Span(begin, now_us()))
        return True

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free requests that ended."""
        for request_id in request_ids:
            self._goals.pop(request_id, None)
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

    def _draft(self, work: Sequence[tuple[DraftContext, int]]) -> None:
        """Make each chain as long as its limit, one token a pass."""
        while contexts := [context for context, limit in work if len(context.chain) < limit]:
            self._advance(contexts)

    def _advance(self, contexts: Sequence[DraftContext]) -> None:
        """One pass: one token more on each chain."""
        chosen = self._model.choose([context.next_query() for context in contexts], [context.next_draw() for context in contexts])
        for context, token in zip(contexts, chosen.tokens, strict=True):
            context.append(self._written(context, token))
        if chosen.logprobs:
            for context, logprob in zip(contexts, chosen.logprobs, strict=True):
                context.logprobs.append(logprob)

    def _written(self, context: DraftContext, token: int) -> int:
        """What is put on the chain where the model chose `token`."""
        return token
