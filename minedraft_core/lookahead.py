"""Whether a drafter goes ahead while the target verifies, and how far. Pure."""

from __future__ import annotations

_RESERVE_US = 200
"""Copies and launches of a round."""
_WORTH = 0.3
_MEMORY = 32
_TRIAL = 16


def steps_ahead(verify_us: float, step_us: float, num_drafts: int) -> int:
    """Steps that a drafter goes ahead, 0 to num_drafts + 1, so that it never keeps the target waiting for a draft.

    `verify_us` is the time of a verification, `step_us` that of a draft step. With m steps ahead a request whose chain goes on lacks
    num_drafts + 1 - m tokens; once they are drafted the target goes on, and the drafter has 2 m - 1 steps left in the time of that
    verification. One step alone guesses the target's own token and gains nothing.
    """
    steps = int(((verify_us - _RESERVE_US) / step_us + 1) / 2) if step_us > 0 else 0
    return min(steps, num_drafts + 1) if steps > 1 else 0


class Prospect:
    """Whether going ahead has paid of late: a round is saved where each of its requests could use what was drafted ahead.

    Beside a target on the same device every pass ahead makes the verification longer, so a drafter that is seldom right stops. Then each
    sixteenth round is a trial. A mean that begins with one round saved, and forgets once it is a mean of many.
    """

    def __init__(self) -> None:
        self._rate, self._count, self._idle = 1.0, 1, 0

    def learn(self, hits: int, misses: int) -> None:
        """So many requests of a round could use their tokens, so many could not."""
        if hits or misses:
            self._count = min(self._count + 1, _MEMORY)
            self._rate += ((misses == 0) - self._rate) / self._count

    def worth(self) -> bool:
        """Whether to go ahead in the round that comes. To be asked once a round."""
        self._idle = 0 if self._rate >= _WORTH or self._idle + 1 == _TRIAL else self._idle + 1
        return self._idle == 0
