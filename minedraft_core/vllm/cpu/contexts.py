"""The draft process's memory of the requests: their tokens, their KV blocks, and how much of the KV cache is valid."""

from __future__ import annotations

from dataclasses import dataclass, field

from minedraft_core.types import DraftItem, Sampling
from minedraft_core.vllm.cpu.noise import Draw, SeedStream


@dataclass
class DraftContext:
    """One request. The KV cache holds `cached` valid positions; `drafted` are the tokens last proposed after the context.

    `sampling` tells how the target draws, and `seeds` with which noise; both are none for a greedy request.
    """

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    drafted: list[int] = field(default_factory=list)
    sampling: Sampling | None = None
    seeds: SeedStream | None = None

    def draw(self, ahead: int) -> Draw | None:
        """How the token `ahead` places after the context is drawn; None where it is the most likely one."""
        if self.sampling is None or self.seeds is None:
            return None
        return Draw(self.sampling.temperature, self.seeds.at(len(self.tokens) - self.sampling.prompt_len + ahead))

    def extend(self, tokens: list[int]) -> None:
        """Take in what the target delivered; keep the KV entries of drafts it accepted.

        The last draft was never an input, so at most all but one of the drafted positions are valid.
        """
        matching = 0
        while matching < min(len(tokens), len(self.drafted) - 1) and tokens[matching] == self.drafted[matching]:
            matching += 1
        if self.drafted and self.cached == len(self.tokens):
            self.cached += matching
        self.tokens += tokens
        self.drafted = []


class OutOfSyncError(Exception):
    """The engine and the draft process disagree about a request."""


class DraftContexts:
    """All requests, and the free blocks of the KV cache. Block 0 is never given out: it takes the writes of padding."""

    def __init__(self, num_blocks: int, block_size: int, max_context: int) -> None:
        self._block_size, self._max_context = block_size, max_context
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
        context.extend(item.tokens)
        if item.sampling != context.sampling:
            context.sampling = item.sampling
            context.seeds = None if item.sampling is None else SeedStream(item.sampling.seed)
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
