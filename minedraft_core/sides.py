"""Which side a request joins, whose turn it is, and who changes sides: the whole difference between the modes. Pure functions.

A cadence of one side is plain or sequential decoding, of two sides MineDraft (arXiv 2603.18016): the target verifies one side
while the drafter drafts for the other. With one side a drafter can also go on along its own drafts while they are verified (PEARL).
"""

from __future__ import annotations

from typing import Protocol

from minedraft_core.types import Mode, Side

Counts = tuple[int, int]
"""Requests on side A and on side B."""


def join(counts: Counts, verified_last: Side) -> Side:
    """The side a new request joins: the one with fewer requests, at a tie the one verified last.

    The side verified last has its next turn farthest away, which leaves the drafter the most time for the new request.
    """
    if counts[0] == counts[1]:
        return verified_last
    return Side.A if counts[0] < counts[1] else Side.B


def turn(counts: Counts, verified_last: Side) -> Side | None:
    """The side to verify next: the other one, unless it is empty. None where no request is on any side."""
    if counts[verified_last.other]:
        return verified_last.other
    return verified_last if counts[verified_last] else None


def surplus(counts: Counts, due: Side) -> int:
    """How many requests of the due side should wait one turn and go on with the other side.

    Only the due side gives requests away: its drafts are ready and stay valid, while a request of the side
    just verified would have to be verified at once, before it was drafted for. An empty side is filled the same way, so
    two requests always run on two sides.
    """
    return max(0, (counts[due] - counts[due.other]) // 2)


class Cadence(Protocol):
    """Which running requests the target visits at each step. Remembers who is on which side; knows nothing of time or devices."""

    mode: Mode
    sides: int

    @property
    def counts(self) -> Counts:
        """Requests on each side."""
        ...

    def ahead(self, num_tokens: int) -> int:
        """How many tokens the drafter goes on with while its draft of `num_tokens` is verified."""
        ...

    def admit(self, request_id: str) -> None:
        """A request has its first token and takes part from now on."""
        ...

    def leave(self, request_id: str) -> None:
        """A request ended or lost its place. Unknown ones are ignored."""
        ...

    def advance(self) -> Side | None:
        """Begin a step: the side to verify now, None where there is none."""
        ...

    def members(self, side: Side | None) -> list[str]:
        """The requests of a side."""
        ...

    def __contains__(self, request_id: str) -> bool:
        """Whether the request takes part."""
        ...


class OneSide:
    """All requests at every step: plain decoding, and sequential speculative decoding."""

    sides = 1

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._members: dict[str, None] = {}

    @property
    def counts(self) -> Counts:
        """All are on side A."""
        return len(self._members), 0

    def ahead(self, num_tokens: int) -> int:
        """None: the drafter waits for the target."""
        return 0

    def admit(self, request_id: str) -> None:
        """Take part from the next step on."""
        self._members[request_id] = None

    def leave(self, request_id: str) -> None:
        """Take no further part."""
        self._members.pop(request_id, None)

    def advance(self) -> Side | None:
        """Always side A, unless it is empty."""
        return Side.A if self._members else None

    def members(self, side: Side | None) -> list[str]:
        """All requests, or none."""
        return list(self._members) if side is Side.A else []

    def __contains__(self, request_id: str) -> bool:
        """Whether the request takes part."""
        return request_id in self._members


class OneSideAhead(OneSide):
    """All requests at every step, while the drafter goes on along its own drafts (PEARL, arXiv 2408.11850)."""

    def __init__(self) -> None:
        super().__init__(Mode.PEARL)

    def ahead(self, num_tokens: int) -> int:
        """The token that the target adds to a draft that it accepts, and the next draft."""
        return num_tokens + 1


class TwoSides:
    """Two sides in turn, kept at equal size. With one side empty the other is verified at every step."""

    mode = Mode.PARALLEL
    sides = 2

    def __init__(self) -> None:
        self._members: tuple[dict[str, None], dict[str, None]] = ({}, {})
        self._verified_last = Side.B

    @property
    def counts(self) -> Counts:
        """Requests on each side."""
        return len(self._members[Side.A]), len(self._members[Side.B])

    def ahead(self, num_tokens: int) -> int:
        """None: the drafter has the other side to draft for."""
        return 0

    def admit(self, request_id: str) -> None:
        """Join the side that `join` names."""
        self._members[join(self.counts, self._verified_last)][request_id] = None

    def leave(self, request_id: str) -> None:
        """Leave whichever side."""
        for members in self._members:
            members.pop(request_id, None)

    def advance(self) -> Side | None:
        """The side whose turn it is, after its surplus has moved to the other one; the newest move first."""
        due = turn(self.counts, self._verified_last)
        if due is None:
            return None
        for _ in range(surplus(self.counts, due)):
            request_id, _none = self._members[due].popitem()
            self._members[due.other][request_id] = None
        self._verified_last = due
        return due

    def members(self, side: Side | None) -> list[str]:
        """The requests of a side."""
        return [] if side is None else list(self._members[side])

    def __contains__(self, request_id: str) -> bool:
        """Whether the request takes part."""
        return any(request_id in members for members in self._members)


def cadence_of(mode: Mode) -> Cadence:
    """The cadence that makes a mode."""
    match mode:
        case Mode.PARALLEL:
            return TwoSides()
        case Mode.PEARL:
            return OneSideAhead()
    return OneSide(mode)
