from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.figures import faults, spread, summarise
from loadtest.plan import Demands, Limits
from loadtest.sample import Outcome, Sample, bucket_of, seconds_of

LIMITS = Limits(ttft_ms=200, tpot_ms=50)


def sample(begin: float = 0.0, first: float = 0.1, last: float = 1.0, tokens: int = 10, **more: object) -> Sample:
    fields = {
        "endpoint": "completions",
        "outcome": Outcome.DONE,
        "end": last,
        "prompt_tokens": 5,
        "deliveries": tokens,
        "spoken": last - first,
    }
    return Sample(**{"begin": begin, "first": first, "last": last, "completion_tokens": tokens, **fields, **more})


def test_the_figures_of_two_requests_by_hand() -> None:
    quick, slow = sample(begin=100.0), sample(begin=101.0, first=0.3, last=3.0, tokens=28)
    figures = summarise([quick, slow], LIMITS, gpus=5)
    assert figures.duration_s == 4.0
    assert (figures.done, figures.prompt_tokens, figures.completion_tokens) == (2, 10, 38)
    assert figures.tokens_per_second == 38 / 4
    assert figures.tokens_per_second_per_gpu == 38 / 20
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.mean == pytest.approx(200)
    assert figures.tpot_ms is not None
    assert (figures.tpot_ms.p50, figures.tpot_ms.largest) == (pytest.approx(100), pytest.approx(100))
    assert figures.slo == {"ttft": 0.5, "tpot": 0.0, "all": 0.0}
    assert figures.goodput.requests_per_second == 0


def test_goodput_counts_what_is_within_every_limit() -> None:
    good, late = sample(last=0.5), sample(first=0.25, last=0.5)
    figures = summarise([good, late, sample(outcome=Outcome.FAILED, tokens=0, error="no")], LIMITS, gpus=2)
    assert figures.goodput.requests_per_second == 1 / 0.5
    assert figures.goodput.tokens_per_second == 10 / 0.5
    assert figures.goodput.tokens_per_second_per_gpu == 10
    assert figures.slo == {"ttft": 1 / 3, "tpot": 2 / 3, "all": 1 / 3}
    assert figures.errors == {"no": 1}


def test_a_request_that_was_left_or_cut_is_counted_apart() -> None:
    figures = summarise([sample(), sample(outcome=Outcome.ABORTED, first=9.0), sample(outcome=Outcome.CUT, first=9.0)], LIMITS)
    assert (figures.done, figures.aborted, figures.cut, figures.failed) == (1, 1, 1, 0)
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.count == 1
    assert figures.slo["ttft"] == 1.0


def test_one_token_has_no_time_per_token_and_keeps_its_limit() -> None:
    figures = summarise([sample(last=0.1, tokens=1)], LIMITS)
    assert figures.tpot_ms is None
    assert figures.slo == {"ttft": 1.0, "tpot": 1.0, "all": 1.0}


def test_without_limits_every_answered_request_is_good() -> None:
    figures = summarise([sample(), sample(tokens=0)], Limits())
    assert figures.slo == {}
    assert figures.goodput.requests_per_second == 1.0


def test_nothing_at_all_is_no_division_by_zero() -> None:
    figures = summarise([], LIMITS)
    assert figures.tokens_per_second == 0
    assert figures.ttft_ms is None
    assert faults(figures, Demands(0.9, 0.0)) == ["no request ended after the warm-up: test longer"]
    left = summarise([sample(outcome=Outcome.ABORTED)], Limits())
    assert faults(left, Demands(0.9, 0.0)) == ["every client left early, so no request can be judged: lower --abort-share"]


def test_demands() -> None:
    figures = summarise([sample(last=0.5), sample(first=0.3), sample(outcome=Outcome.FAILED)], LIMITS)
    assert faults(figures, Demands(slo_share=0.3, error_share=0.4)) == []
    assert faults(figures, Demands(slo_share=0.5, error_share=0.1)) == [
        "33.3% of the requests failed, 10.0% may",
        "33.3% of the requests kept every limit, 50.0% have to",
    ]


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=200))
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(np.percentile(values, [50, 90, 95, 99]).tolist(), abs=1e-6)
    assert found.quantiles[0] == min(values)
    assert found.quantiles[100] == max(values)


def test_gaps_are_told_within_half_a_percent() -> None:
    draws = random.Random(3)
    gaps = [draws.lognormvariate(-4, 1) for _ in range(5000)]
    counts: dict[int, int] = {}
    for gap in gaps:
        counts[bucket_of(gap)] = counts.get(bucket_of(gap), 0) + 1
    figures = summarise([sample(gaps=counts, spoken=sum(gaps))], LIMITS)
    assert figures.itl_ms is not None
    wanted = np.percentile(gaps, [50, 90, 95, 99]) * 1000
    assert [figures.itl_ms.p50, figures.itl_ms.p90, figures.itl_ms.p95, figures.itl_ms.p99] == pytest.approx(wanted.tolist(), rel=0.006)
    assert figures.itl_ms.mean == pytest.approx(np.mean(gaps) * 1000)


@given(st.floats(min_value=1e-6, max_value=1e4))
def test_a_bucket_is_one_percent_wide(seconds: float) -> None:
    assert seconds_of(bucket_of(seconds)) == pytest.approx(seconds, rel=0.0051)
