"""Hidden drafting time and the round-time inequality."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft_core.overlap import hidden_us, parallel_over_sequential
from minedraft_core.types import Span


@pytest.mark.parametrize(
    ("draft", "verifications", "expected"),
    [
        (Span(100, 200), [], 0),
        (Span(100, 200), [Span(0, 50), Span(250, 300)], 0),
        (Span(100, 200), [Span(0, 100), Span(200, 300)], 0),
        (Span(100, 200), [Span(0, 300)], 100),
        (Span(100, 200), [Span(120, 150)], 30),
        (Span(100, 200), [Span(50, 130), Span(170, 400)], 60),
        (Span(100, 200), [Span(100, 140), Span(141, 200)], 99),
        (Span(100, 100), [Span(0, 300)], 0),
    ],
)
def test_hidden_time_by_hand(draft, verifications, expected):
    assert hidden_us(draft, verifications) == expected


def spans_in_order(cuts):
    """Spans that do not overlap, with gaps between them."""
    cuts = sorted(cuts)
    return [Span(start, end) for start, end in zip(cuts[::2], cuts[1::2], strict=False)]


moments = st.integers(0, 1_000)
verified = st.lists(moments, max_size=12).map(spans_in_order)


@given(st.tuples(moments, moments).map(sorted), verified)
def test_hidden_time_counts_the_microseconds_in_both(interval, verifications):
    draft = Span(*interval)
    both = sum(any(span.start_us <= tick < span.end_us for span in verifications) for tick in range(draft.start_us, draft.end_us))
    assert hidden_us(draft, verifications) == both <= draft.duration_us


@given(st.lists(moments, min_size=3, max_size=3).map(sorted), verified)
def test_hidden_time_adds_up_over_the_parts_of_a_draft(cuts, verifications):
    start, middle, end = cuts
    parts = hidden_us(Span(start, middle), verifications) + hidden_us(Span(middle, end), verifications)
    assert parts == hidden_us(Span(start, end), verifications)


def test_a_span_that_runs_backwards_has_no_length():
    assert Span(20, 10).duration_us == 0
    assert Span(10, 25).duration_us == 15


@pytest.mark.parametrize(
    ("verify_all", "draft_all", "verify_half", "draft_half", "expected"),
    [
        (2.0, 2.0, 1.0, 1.0, 2.0),  # everything proportional to the batch, equal shares: twice as fast
        (4.0, 1.0, 2.0, 0.5, 1.25),  # verification is the longer part
        (1.0, 1.0, 1.0, 1.0, 1.0),  # both flat in the batch: nothing gained
        (19.2, 8.6, 19.2, 8.6, 27.8 / 38.4),  # a flat, longer verification: two sides lose
        (1.0, 3.0, 0.5, 1.5, 4 / 3),  # drafting is the longer part
    ],
)
def test_the_round_time_inequality(verify_all, draft_all, verify_half, draft_half, expected):
    assert parallel_over_sequential(verify_all, draft_all, verify_half, draft_half) == pytest.approx(expected)
