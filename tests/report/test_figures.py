"""Figures against values worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from minedraft_core.report.figures import Figures, figures_of, percentile
from minedraft_core.report.reading import read_traces
from minedraft_core.trace import RunHeader
from minedraft_core.types import Mode
from tests.report.samples import header, original, run_lines, write


def figures(tmp_path: Path, *runs: bytes, head: RunHeader | None = None) -> Figures:
    (trace,) = read_traces([write(tmp_path / "arm.jsonl", head or header(gpus=5), *runs)])
    return figures_of(trace)


def test_throughput_is_the_median_of_the_runs(tmp_path: Path) -> None:
    found = figures(tmp_path, run_lines(), run_lines(1000, speed=2.0), run_lines(2000, speed=4.0))
    assert found.tokens_per_second_runs == pytest.approx((170.0, 340.0, 680.0))
    assert found.tokens_per_second == pytest.approx(340.0)
    assert found.tokens_per_second_per_gpu == pytest.approx(68.0)
    assert found.makespan_s == pytest.approx(0.05)
    assert found.requests_per_second == pytest.approx(40.0)
    assert found.makespan_per_request_ms == pytest.approx(25.0)
    assert (found.runs, found.requests) == (3, 6)


def test_decode_throughput_leaves_prompt_passes_out_and_keeps_gaps(tmp_path: Path) -> None:
    found = figures(tmp_path, run_lines())
    # Three passes of 5 tokens; each takes 16 ms after a gap of 4.
    assert found.decode_tokens_per_second == pytest.approx(15 / 0.060)


def test_times_of_requests(tmp_path: Path) -> None:
    found = figures(tmp_path, run_lines())
    assert found.latency is not None
    assert (found.latency.p50, found.latency.p99) == pytest.approx((100.0, 100.0))
    assert found.ttft is not None
    assert (found.ttft.p50, found.ttft.p90, found.ttft.mean) == pytest.approx((40.0, 60.0, 50.0))
    assert found.wait is not None
    # The first one was taken up at 0, which stands for unknown in a trace.
    assert found.wait.p50 == pytest.approx(10.0)
    assert found.execution is not None
    assert found.execution.p50 == pytest.approx(90.0)
    assert found.tpot is not None
    assert (found.tpot.p50, found.tpot.p90) == pytest.approx((40 / 7, 60 / 8))
    assert found.outside_passes is None


def test_passes_and_drafts(tmp_path: Path) -> None:
    found = figures(tmp_path, run_lines())
    assert found.step is not None
    assert found.step.p50 == pytest.approx(16.0)
    assert found.prompt_step is not None
    assert found.prompt_step.p50 == pytest.approx(40.0)
    assert found.gap is not None
    assert found.gap.p50 == pytest.approx(4.0)
    assert found.draft is not None
    assert found.draft.p50 == pytest.approx(8.0)
    assert found.drafter_wait is not None
    assert found.drafter_wait.p50 == pytest.approx(0.5)
    assert found.overhead is not None
    assert found.overhead.p50 == pytest.approx(1.0)
    assert found.hidden_share == pytest.approx(0.5)
    assert [(size.requests, size.median_ms, size.count) for size in found.verify_by_size] == [(2, pytest.approx(16.0), 3)]
    assert [(size.requests, size.median_ms, size.count) for size in found.draft_by_size] == [(2, pytest.approx(8.0), 3)]


def test_speculation(tmp_path: Path) -> None:
    found = figures(tmp_path, run_lines())
    assert (found.proposed, found.verified, found.accepted) == (12, 12, 9)
    assert found.verification_success_rate == pytest.approx(0.75)
    assert found.acceptance_length == pytest.approx(1 + 9 / 6)
    assert found.acceptance_by_position == pytest.approx((1.0, 0.5))
    assert found.missing == ()


def test_an_original_trace_gives_what_it_can_and_names_the_rest(tmp_path: Path) -> None:
    (trace,) = read_traces([original(tmp_path / "trace.jsonl", bundles=1)])
    found = figures_of(trace)
    assert found.tokens_per_second == pytest.approx(10 / 0.1)
    assert found.ttft is not None
    assert found.ttft.p50 == pytest.approx(40.0)
    assert found.outside_passes is not None
    assert (found.outside_passes.p50, found.outside_passes.p90) == pytest.approx((4.0, 9.0))
    assert found.verify is not None
    assert found.verify.p50 == pytest.approx(20.0)
    assert found.draft is not None
    assert found.draft.p50 == pytest.approx(10.0)
    assert found.verification_success_rate == pytest.approx(0.5)
    assert found.acceptance_length == pytest.approx(1 + 5 / 3)
    assert found.decode_tokens_per_second == pytest.approx(8 / 0.060, rel=1e-4)
    assert {line.partition(":")[0] for line in found.missing} == {
        "wait before the first pass",
        "time the target is idle between passes",
        "acceptance by position",
        "hidden drafting and overlap lanes of the drafter",
    }


def test_a_trace_without_requests_still_has_passes(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"\n".join(line for line in run_lines(mode=Mode.OFF).splitlines() if b'"request"' not in line) + b"\n")
    (trace,) = read_traces([path])
    found = figures_of(trace)
    assert found.tokens_per_second is None
    assert found.step is not None
    assert any("no finished request" in line for line in found.missing)


@pytest.mark.parametrize(("share", "expected"), [(50, 2), (75, 3), (76, 4), (90, 4), (100, 4), (1, 1)])
def test_a_percentile_is_a_value_that_was_seen(share: int, expected: int) -> None:
    assert percentile([1, 2, 3, 4], share) == expected
