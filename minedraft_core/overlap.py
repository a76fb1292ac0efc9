"""How much drafting the target's passes hide. Pure functions over spans of time."""

from __future__ import annotations

from collections.abc import Iterable

from minedraft_core.types import Span


def hidden_us(draft: Span, verifications: Iterable[Span]) -> int:
    """Microseconds of `draft` during which the target was verifying. `verifications` must not overlap one another."""
    return sum(max(0, min(draft.end_us, span.end_us) - max(draft.start_us, span.start_us)) for span in verifications)


def parallel_over_sequential(verify_all: float, draft_all: float, verify_half: float, draft_half: float) -> float:
    """Throughput of two sides over that of one, as the round times predict it.

    With C requests running, a round of sequential decoding takes V(C) + D(C), a round of two sides 2 max(V(C/2), D(C/2)), both for
    the same tokens. All four arguments have the same unit of time and are above zero.
    """
    return (verify_all + draft_all) / (2 * max(verify_half, draft_half))
