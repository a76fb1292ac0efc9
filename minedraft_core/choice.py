"""How many tokens are drafted for a batch, and which of them are verified. TETRIS, the choice by likelihood, is in `tetris`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from minedraft_core.types import Draft


class Choice(Protocol):
    """How many tokens are drafted for a batch, and which of them are verified."""

    def width(self, num_drafts: int, batch: int) -> int:
        """Tokens to draft for each request of a batch of so many, where `num_drafts` are asked for."""
        ...

    def keep(self, drafts: Mapping[str, Draft], num_drafts: int, sides: int) -> dict[str, list[int]]:
        """The tokens to verify of the drafts of one batch."""
        ...


class Everything:
    """Every draft token is verified."""

    def width(self, num_drafts: int, batch: int) -> int:
        """As many as asked for."""
        return num_drafts

    def keep(self, drafts: Mapping[str, Draft], num_drafts: int, sides: int) -> dict[str, list[int]]:
        """All tokens."""
        return {request_id: draft.tokens for request_id, draft in drafts.items()}


@dataclass(frozen=True)
class ByBatch(Everything):
    """How many are drafted follows from the size of the batch: verifying a token is nearly free in a small one, and not in a large one.

    Batches of `sizes[i]` requests up to the next size get `lengths[i]` tokens; `sizes` rise from 1.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]]) -> ByBatch:
        """From rows of smallest batch, largest batch and tokens, rising from 1. What no row names follows the row before."""
        return cls(tuple(smallest for smallest, _, _ in rows), tuple(length for _, _, length in rows))

    def width(self, num_drafts: int, batch: int) -> int:
        """As many as the batch gets, at most as many as asked for."""
        return min(num_drafts, self.lengths[bisect_right(self.sizes, max(1, batch)) - 1])
