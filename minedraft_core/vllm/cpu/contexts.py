"""The draft process's memory of the requests: their tokens, their KV blocks, and how much of the KV cache is valid."""

from __future__ import annotations

from dataclasses import dataclass, field

from minedraft_core.types import DraftItem, Sampling
from minedraft_core.vllm.cpu.lookahead import Chances, LookaheadTally
from minedraft_core.vllm.cpu.noise import Draw, SeedStream
from minedraft_core.vllm.cpu.query import Query


@dataclass
class DraftContext:
    """One request. The KV cache holds `cached` valid positions.

    `chain` is what the drafter wrote after the context, with `logprobs` where they are computed. Its last `ahead` tokens were drafted
    ahead; its first `given` are the draft that was handed out, where lookahead learns from it. While there is a chain the cache holds the
    whole context and the chain but for its last token, which was never an input.
    `sampling` tells how the target draws, and `seeds` with which noise; both are none for a greedy request.
    """

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    chain: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ahead: int = 0
    given: int = 0
    sampling: Sampling | None = None
    seeds: SeedStream | None = None

    def next_query(self) -> Query:
        """The tokens whose run gives the next token of the chain. The KV entry of the one before last of the context may be missing."""
        if self.chain:
            return Query(self.chain[-1:], len(self.tokens) + len(self.chain) - 1, self.blocks)
        return Query(self.tokens[-2:], max(0, len(self.tokens) - 2), self.blocks)

    def next_draw(self) -> Draw | None:
        """How the next token of the chain is drawn; None where it is the most likely one."""
        if self.sampling is None or self.seeds is None:
            return None
        return Draw(self.sampling.temperature, self.seeds.at(len(self.tokens) - self.sampling.prompt_len + len(self.chain)))

    def append(self, token: int) -> None:
        """Take in the next token of the chain, whose query has run."""
        self.chain.append(token)
        self.cached = len(self.tokens)

    @property
    def sureness(self) -> float:
        """The draft's log-probability, 0 where it is not computed."""
        return sum(self.logprobs[: self.given])

    def accepted_whole(self, tokens: list[int]) -> bool | None:
        """Whether the target accepted the whole draft, as these tokens tell; None where it was cut before it was verified."""
        draft = self.chain[: self.given]
        if tokens[: self.given] == draft:
            return True
        return None if tokens == draft[: len(tokens)] else False

    def extend(self, tokens: list[int]) -> bool:
        """Take in what the target delivered; True where all of it was on the chain, whose rest then goes on.

        The KV entries of accepted tokens stay: of the chain all but the last token were inputs.
        """
        matching = 0
        while matching < min(len(tokens), len(self.chain)) and tokens[matching] == self.chain[matching]:
            matching += 1
        on_chain = matching == len(tokens)
        if self.chain:
            self.cached += min(matching, len(self.chain) - 1)
        self.tokens += tokens
        kept = matching if on_chain else len(self.chain)
        self.chain, self.logprobs, self.ahead, self.given = self.chain[kept:], self.logprobs[kept:], 0, 0
        return on_chain


class OutOfSyncError(Exception):
    """The engine and the draft process disagree about a request."""


class DraftContexts:
    """All requests, and the free blocks of the KV cache. Block 0 is never given out: it takes the writes of padding."""

    def __init__(self, num_blocks: int, block_size: int, max_context: int) -> None:
        self._block_size, self._max_context = block_size, max_context
        self.tally, self.chances = LookaheadTally(), Chances()
        self._free = list(range(num_blocks - 1, 0, -1))
        self._contexts: dict[str, DraftContext] = {}

    def update(self, item: DraftItem) -> DraftContext:
        """Bring a request up to date. A base of 0 begins it anew. Raises OutOfSyncError where tokens are missing."""
        if item.base == 0:
            self.forget(item.request_id)
            self._contexts[item.request_id] = DraftContext()
        context = self._contexts.get(item.request_id)
        if context is None or len(context.tokens) != item.base:
            known = None if context is None else len(context.tokens)
            raise OutOfSyncError(f"request {item.request_id}: the engine assumes {item.base} known tokens, known are {known}")
        if context.given and (whole := context.accepted_whole(item.tokens)) is not None:
            self.chances.learn(context.sureness, whole=whole)
        ahead = context.ahead
        on_chain = context.extend(item.tokens)
        if ahead:
            self.tally.settle(ahead, hit=on_chain)
        if item.sampling != context.sampling:
            context.sampling = item.sampling
            context.seeds = None if item.sampling is None else SeedStream(item.sampling.seed)
            context.chain, context.logprobs = [], []
        return context

    def reserve(self, context: DraftContext, num_drafts: int) -> bool:
        """Room for the context and so many drafts; False where the model or the cache has none."""
        length = len(context.tokens) + num_drafts
        if length > self._max_context:
            return False
        missing = -(-length // self._block_size) - len(context.blocks)
        if missing > len(self._free):
            return False
        context.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def forget(self, request_id: str) -> None:
        """Free a request's blocks."""
        context = self._contexts.pop(request_id, None)
        if context is not None:
            self._free += context.blocks
            if context.ahead:
                self.tally.settle(context.ahead, hit=False)
