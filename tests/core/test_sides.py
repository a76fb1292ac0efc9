"""Who joins which side, whose turn it is, who moves: by example, and over random lives of requests."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minedraft_core.sides import OneSide, TwoSides, cadence_of, join, surplus, turn
from minedraft_core.types import Mode, Side

A, B = Side.A, Side.B


@pytest.mark.parametrize(
    ("counts", "verified_last", "expected"),
    [((0, 0), A, A), ((0, 0), B, B), ((3, 3), A, A), ((3, 3), B, B), ((1, 2), B, A), ((1, 2), A, A), ((2, 1), A, B), ((5, 0), B, B)],
)
def test_join_evens_out_and_prefers_the_side_whose_turn_is_farthest(counts, verified_last, expected):
    assert join(counts, verified_last) is expected


@pytest.mark.parametrize(
    ("counts", "verified_last", "expected"),
    [((1, 1), A, B), ((1, 1), B, A), ((1, 0), A, A), ((1, 0), B, A), ((0, 4), A, B), ((0, 4), B, B), ((0, 0), A, None), ((0, 0), B, None)],
)
def test_turn_alternates_and_skips_an_empty_side(counts, verified_last, expected):
    assert turn(counts, verified_last) is expected


@pytest.mark.parametrize(
    ("counts", "due", "expected"),
    [
        ((4, 4), A, 0),
        ((5, 4), A, 0),
        ((6, 4), A, 1),
        ((7, 4), A, 1),
        ((8, 0), A, 4),
        ((1, 0), A, 0),
        ((2, 0), A, 1),
        ((2, 6), A, 0),
        ((2, 6), B, 2),
    ],
)
def test_only_the_due_side_gives_requests_away(counts, due, expected):
    assert surplus(counts, due) == expected


def test_every_mode_has_its_cadence():
    cadences = {mode: cadence_of(mode) for mode in Mode}
    assert {mode: (cadence.mode, cadence.sides) for mode, cadence in cadences.items()} == {
        mode: (mode, 2 if mode is Mode.PARALLEL else 1) for mode in Mode
    }
    assert {mode: cadence.ahead(4) for mode, cadence in cadences.items() if cadence.ahead(4)} == {Mode.PEARL: 5}


def test_two_sides_alternate_with_equal_halves():
    cadence = TwoSides()
    for name in "abcd":
        cadence.admit(name)
    assert cadence.counts == (2, 2)
    first, second = cadence.advance(), cadence.advance()
    assert {first, second} == {A, B}
    assert sorted(cadence.members(first) + cadence.members(second)) == list("abcd")
    assert [cadence.advance() for _ in range(4)] == [first, second, first, second]


def test_a_single_request_is_verified_at_every_step_and_a_second_one_brings_back_two_sides():
    cadence = TwoSides()
    cadence.admit("a")
    for _ in range(3):
        assert cadence.members(cadence.advance()) == ["a"]
    cadence.admit("b")
    visited = [cadence.members(cadence.advance()) for _ in range(4)]
    assert visited in ([["a"], ["b"]] * 2, [["b"], ["a"]] * 2)


def test_an_emptied_side_is_filled_again_by_the_newest_of_the_due_side():
    cadence = TwoSides()
    for name in "abcdef":
        cadence.admit(name)
    emptied = cadence.advance()
    remaining = cadence.members(emptied.other)
    for name in cadence.members(emptied):
        cadence.leave(name)
    assert cadence.advance() is emptied.other
    assert cadence.members(emptied.other) == remaining[:2]
    assert cadence.members(emptied) == remaining[2:]


def test_one_side_visits_everyone_at_every_step():
    cadence = OneSide(Mode.SEQUENTIAL)
    assert cadence.advance() is None
    cadence.admit("a")
    cadence.admit("b")
    cadence.admit("a")
    assert cadence.counts == (2, 0)
    assert cadence.advance() is A
    assert cadence.members(A) == ["a", "b"]
    assert cadence.members(B) == cadence.members(None) == []
    cadence.leave("a")
    cadence.leave("never seen")
    assert "a" not in cadence
    assert "b" in cadence
    cadence.leave("b")
    assert cadence.advance() is None


def test_each_mode_has_its_cadence():
    for mode in (Mode.OFF, Mode.SEQUENTIAL):
        cadence = cadence_of(mode)
        assert isinstance(cadence, OneSide)
        assert cadence.mode is mode
    assert isinstance(cadence_of(Mode.PARALLEL), TwoSides)
    assert cadence_of(Mode.PARALLEL).mode is Mode.PARALLEL


def test_sides_are_each_others_other():
    assert A.other is B
    assert B.other is A


class TwoSidesLife(RuleBasedStateMachine):
    """Random arrivals, departures and steps, checked against a plain set of the requests that run."""

    def __init__(self):
        super().__init__()
        self.cadence = TwoSides()
        self.running = {}
        self.created = 0
        self.quiet_steps = 0
        self.last_due = None

    @rule(count=st.integers(1, 5))
    def admit(self, count):
        for _ in range(count):
            name = f"r{self.created}"
            self.created += 1
            self.cadence.admit(name)
            self.running[name] = 0
        self.quiet_steps = 0

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        for name in data.draw(st.lists(st.sampled_from(sorted(self.running)), min_size=1, max_size=4, unique=True)):
            self.cadence.leave(name)
            del self.running[name]
        self.quiet_steps = 0

    @precondition(lambda self: self.last_due is not None)
    @rule()
    def finish_everything_verified(self):
        for name in self.cadence.members(self.last_due):
            self.cadence.leave(name)
            del self.running[name]
        self.quiet_steps = 0

    @rule(steps=st.integers(1, 4))
    def advance(self, steps):
        for _ in range(steps):
            self._advance()

    def _advance(self):
        before = {side: set(self.cadence.members(side)) for side in Side}
        previous = self.last_due
        due = self.last_due = self.cadence.advance()
        visited = set(self.cadence.members(due))
        if not self.running:
            assert due is None
            return
        assert visited
        assert len(visited) <= -(-len(self.running) // 2)
        moved = {name for side in Side for name in before[side] if name not in self.cadence.members(side)}
        assert moved <= before[due], "only the due side gives requests away"
        if len(self.running) > 1:
            assert min(self.cadence.counts) > 0, "two requests always run on two sides"
            if previous is not None and before[previous.other]:
                assert due is previous.other
        for name in self.running:
            self.running[name] = 0 if name in visited or name in moved else self.running[name] + 1
            assert self.running[name] <= 1, f"{name} was passed over twice without having moved"
        self.quiet_steps += 1
        if self.quiet_steps >= 2:
            assert abs(self.cadence.counts[0] - self.cadence.counts[1]) <= 1
        if self.quiet_steps >= 3:
            assert not moved, "sides of equal size stay as they are"

    @invariant()
    def nobody_is_lost_or_doubled(self):
        members = self.cadence.members(A) + self.cadence.members(B)
        assert sorted(members) == sorted(self.running)
        assert self.cadence.counts == (len(self.cadence.members(A)), len(self.cadence.members(B)))
        assert all(name in self.cadence for name in self.running)
        assert "stranger" not in self.cadence


TwoSidesLife.TestCase.settings = settings(max_examples=120, stateful_step_count=30)
TestTwoSidesLife = TwoSidesLife.TestCase
