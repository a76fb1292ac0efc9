"""How many tokens batches of each size get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft_core.choice import ByBatch, Everything
from minedraft_core.types import Draft


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9), st.integers(1, 64)), min_size=1, max_size=6),
    st.integers(1, 200),
    st.integers(1, 64),
)
def test_a_batch_gets_what_the_last_row_that_begins_before_it_says(steps: list[tuple[int, int, int]], batch: int, most: int) -> None:
    rows, begin = [], 1
    for span, gap, tokens in steps:
        rows.append((begin, begin + span - 1, tokens))
        begin += span + gap
    expected = [tokens for smallest, _, tokens in rows if smallest <= batch][-1]
    assert ByBatch.of(rows).width(most, batch) == min(most, expected)


def test_no_batch_gets_what_the_smallest_one_does() -> None:
    assert ByBatch.of([(1, 4, 3), (5, 8, 1)]).width(4, 0) == 3


@pytest.mark.parametrize("choice", [Everything(), ByBatch.of([(1, 8, 2)])])
def test_all_that_was_drafted_is_verified(choice: Everything) -> None:
    drafts = {"a": Draft([1, 2, 3], [0.0, 0.0, 0.0]), "b": Draft([], [])}
    assert choice.keep(drafts, 2, 1) == {"a": [1, 2, 3], "b": []}
