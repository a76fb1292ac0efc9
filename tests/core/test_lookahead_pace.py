"""How far a drafter goes ahead: never so far that a draft is late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft_core.lookahead import steps_ahead


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
