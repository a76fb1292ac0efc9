"""How far a drafter goes ahead: never so far that a draft is late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft_core.lookahead import Prospect, steps_ahead


@pytest.mark.parametrize(
    ("verify_us", "step_us", "num_drafts", "steps"),
    [(19_200, 2_050, 4, 5), (6_000, 2_100, 4, 0), (8_000, 2_100, 4, 2), (100_000, 2_000, 4, 5), (10_000, 0, 4, 0), (100, 2_000, 4, 0)],
)
def test_steps(verify_us: float, step_us: float, num_drafts: int, steps: int) -> None:
    assert steps_ahead(verify_us, step_us, num_drafts) == steps


@given(st.floats(0, 1e6), st.floats(1, 1e5), st.integers(1, 64))
def test_the_drafter_is_done_when_the_target_has_verified(verify_us: float, step_us: float, num_drafts: int) -> None:
    steps = steps_ahead(verify_us, step_us, num_drafts)
    assert steps == 0 or 2 <= steps <= num_drafts + 1
    assert steps == 0 or (2 * steps - 1) * step_us <= verify_us


def test_going_ahead_goes_on_while_rounds_are_saved() -> None:
    prospect = Prospect()
    assert prospect.worth(), "nothing is known against it"
    for _ in range(200):
        prospect.learn(4, 0)
        prospect.learn(3, 1)
        assert prospect.worth(), "every other round is saved"


def test_a_drafter_that_is_seldom_right_is_tried_now_and_then() -> None:
    prospect = Prospect()
    for _ in range(100):
        prospect.learn(7, 1)
    asked = [prospect.worth() for _ in range(160)]
    assert sum(asked) == 10, "one request of a round without its tokens is enough to lose it; each sixteenth round is a trial"
    for _ in range(32):
        prospect.learn(8, 0)
    assert all(prospect.worth() for _ in range(50)), "it is right again"


def test_rounds_without_tokens_ahead_teach_nothing() -> None:
    prospect = Prospect()
    for _ in range(100):
        prospect.learn(0, 0)
    assert prospect.worth()
