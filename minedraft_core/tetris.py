"""Which draft tokens of a batch are verified. Pure functions of the drafts and their log-probabilities.

TETRIS (arXiv 2502.15197): more tokens are drafted than the target is to verify, and those most likely accepted are chosen over the whole
batch. A token counts only where all before it are accepted, so its score is the sum of the log-probabilities up to it; a sum never grows
along a draft, and so the best tokens are a prefix of each draft.

Choosing tokens by their own log-probability is sound only where what is drawn in the end does not depend on the choice. It holds for the
matching rule of `acceptance`: the target draws its token whatever was drafted. It does not hold for speculative sampling: rejection
restores the target's law only if every token drawn from the draft's law is verified. With p = q = (0.9, 0.1) and a choice that keeps tokens
of at least 0.5, the rare token is never verified; it comes only where it was drafted, not kept, and drawn again: one time in 100. Where
distributions are verified, drafts under TETRIS have to be the argmax, or be scored without looking at the token drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from minedraft_core.types import Draft


def choose(logprobs: torch.Tensor, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
    """How many leading tokens of each draft to verify, `capacity` in all, or every token where there are fewer.

    logprobs: float [n, k], at most 0, of each token given those before it; what lies past a draft's length is not read. lengths: int64 [n].
    The tokens chosen are those with the largest cumulative log-probabilities; at a tie the earlier position, then the earlier request.
    Returns int64 [n]. Nothing here waits for a device.
    """
    count, width = logprobs.shape
    if count == 0 or width == 0:
        return torch.zeros_like(lengths)
    drafted = torch.arange(width, device=logprobs.device) < lengths[:, None]
    # In float64, so that a sum does not lose the small terms of a long draft. A token that was not drafted comes after all others.
    sums = logprobs.double().cumsum(dim=1).clamp(min=torch.finfo(torch.float64).min)
    scores = torch.where(drafted, sums, -torch.inf)
    # Position by position: a stable sort then puts the earlier token of a draft first at a tie, so that what is kept is a prefix.
    best = torch.sort(scores.T.reshape(-1), descending=True, stable=True).indices[:capacity]
    kept = torch.zeros_like(lengths).scatter_reduce(0, best % count, best // count + 1, "amax")
    return torch.minimum(kept, lengths)


@dataclass(frozen=True)
class Room:
    """How many draft tokens of a batch are verified: at most `tokens`, and all where fewer than `turn_on` requests have drafts."""

    tokens: int
    turn_on: int

    def kept(self, lengths: Collection[int]) -> int:
        """Of drafts of these lengths."""
        total = sum(lengths)
        return min(total, self.tokens) if sum(length > 0 for length in lengths) >= self.turn_on else total

    def most(self, max_requests: int, num_drafts: int) -> int:
        """The most there can be."""
        return max(self.tokens, min(self.turn_on - 1, max_requests) * num_drafts)


@dataclass(frozen=True)
class Tetris:
    """`extra` further tokens are drafted for batches of at least `turn_on` requests, and the best of the batch are verified.

    `capacity` is the number of tokens verified in a batch; 0 stands for `num_drafts` of each request of a full batch, of which there are
    `max_requests` over the number of sides. A batch smaller than `turn_on` is drafted for and verified as without TETRIS.
    """

    extra: int
    turn_on: int
    capacity: int
    max_requests: int

    def width(self, num_drafts: int, batch: int) -> int:
        """As many as asked for, and the extra ones where TETRIS works."""
        return num_drafts + self.extra if self._works(batch) else num_drafts

    def keep(self, drafts: Mapping[str, Draft], num_drafts: int, sides: int) -> dict[str, list[int]]:
        """The best tokens of the batch, or the first `num_drafts` of each draft."""
        if not self._works(len(drafts)):
            return {request_id: draft.tokens[:num_drafts] for request_id, draft in drafts.items()}
        lengths = [len(draft.tokens) for draft in drafts.values()]
        width = max(lengths)
        padded = [[*draft.logprobs, *[0.0] * (width - len(draft.logprobs))] for draft in drafts.values()]
        counts = choose(torch.tensor(padded), torch.tensor(lengths), self.room(num_drafts, sides).tokens).tolist()
        return {request_id: draft.tokens[:count] for (request_id, draft), count in zip(drafts.items(), counts, strict=True)}

    def room(self, num_drafts: int, sides: int) -> Room:
        """What is verified of a batch."""
        return Room(self.capacity or num_drafts * -(-self.max_requests // sides), max(1, self.turn_on))

    def _works(self, batch: int) -> bool:
        return batch >= max(1, self.turn_on)
