"""How far a drafter goes ahead while the target verifies. Pure."""

from __future__ import annotations

_RESERVE_US = 200
"""Copies and launches of a round."""


def steps_ahead(verify_us: float, step_us: float, num_drafts: int) -> int:
    """Steps that a drafter goes ahead, 0 to num_drafts + 1, so that it never keeps the target waiting for a draft.

    `verify_us` is the time of a verification, `step_us` that of a draft step. With m steps ahead a request whose chain goes on lacks
    num_drafts + 1 - m tokens; once they are drafted the target goes on, and the drafter has 2 m - 1 steps left in the time of that
    verification. One step alone guesses the target's own token and gains nothing.
    """
    steps = int(((verify_us - _RESERVE_US) / step_us + 1) / 2) if step_us > 0 else 0
    return min(steps, num_drafts + 1) if steps > 1 else 0
