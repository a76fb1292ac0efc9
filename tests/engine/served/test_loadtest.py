"""A load test of the real server: what the client measured, what the server's metrics say and what its trace holds are the same."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.sample import Outcome
from tests.engine.server_process import Served
from tests.loadtest.running import Ran, run_load_test

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SECONDS = 20
WITHIN = 0.03
# Long prompts, so that what HTTP adds to the first token is little, and in token ids: the server's times begin when the text is tokenized.
LOAD = ["-u", "4", "--input-tokens", "900:1100", "--max-tokens", "40:60", "--extra-body", '{"ignore_eos": true, "temperature": 0}']
TIMES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}


class Watched:
    """A load test and what the server told of it."""

    def __init__(self, server: Served, folder: Path) -> None:
        self._server = server
        warm = run_load_test(server.url, folder, "-t", "4s", *LOAD, "--seed", "1")
        assert warm.code == 0, warm.log
        before, seen = self._counters(), len(server.lines("request"))
        self.ran: Ran = run_load_test(server.url, folder, "-t", f"{SECONDS}s", *LOAD, "--slo-ttft-ms", "60000", seconds=200)
        assert self.ran.code == 0, self.ran.log
        time.sleep(1)
        self.counted = {name: value - before[name] for name, value in self._counters().items()}
        self.trace: list[dict[str, Any]] = server.lines("request")[seen:]

    def _counters(self) -> dict[str, float]:
        metric = self._server.metric
        found = {f"{name}_{part}": metric(f"{family}_{part}") for name, family in TIMES.items() for part in ("sum", "count")}
        found["requests"] = metric("minedraft_requests_finished_total", reason="length")
        found["tokens"] = metric("minedraft_generation_tokens_total")
        found["good"] = metric("minedraft_goodput_requests_total")
        return found

    def mean_ms(self, name: str) -> float:
        """The mean of a time, by the metrics."""
        return 1000 * self.counted[f"{name}_sum"] / self.counted[f"{name}_count"]

    def traced_ms(self, name: str) -> list[float]:
        """A time of every request, by the trace."""
        times = {
            "ttft": lambda line: line["first_token_us"] - line["start_us"],
            "tpot": lambda line: (line["end_us"] - line["first_token_us"]) / (line["gen_len"] - 1),
            "e2e": lambda line: line["end_us"] - line["start_us"],
        }
        return [times[name](line) / 1000 for line in self.trace]


@pytest.fixture(scope="module")
def watched(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return Watched(served, tmp_path_factory.mktemp("load"))


def test_requests_and_tokens_are_the_same(watched: Watched) -> None:
    figures = watched.ran.results.figures
    assert figures.done == watched.counted["requests"] == len(watched.trace)
    assert figures.completion_tokens == watched.counted["tokens"] == sum(line["gen_len"] for line in watched.trace)
    assert figures.prompt_tokens == sum(line["prompt_len"] for line in watched.trace)
    assert figures.done == watched.counted["good"]
    assert figures.done >= 4


# Client, server and both models share two cores here: whatever else takes one for a moment parts the client's times from the server's.
@pytest.mark.slow
@pytest.mark.parametrize("name", list(TIMES))
def test_times_agree_with_metrics_and_trace(name: str, watched: Watched) -> None:
    found = getattr(watched.ran.results.figures, f"{name}_ms")
    traced = watched.traced_ms(name)
    assert found.mean == pytest.approx(watched.mean_ms(name), rel=WITHIN)
    assert found.mean == pytest.approx(np.mean(traced), rel=WITHIN)
    assert [found.p50, found.p95] == pytest.approx(np.percentile(traced, [50, 95]).tolist(), rel=WITHIN)


def test_throughput_agrees_with_the_trace(watched: Watched) -> None:
    begin, end = min(line["start_us"] for line in watched.trace), max(line["end_us"] for line in watched.trace)
    tokens = sum(line["gen_len"] for line in watched.trace)
    assert watched.ran.results.figures.tokens_per_second == pytest.approx(tokens / (end - begin) * 1e6, rel=WITHIN)


def test_locusts_own_tables_agree_too(watched: Watched) -> None:
    done = [sample for sample in watched.ran.samples if sample.outcome is Outcome.DONE]
    for kind, seconds in (
        ("TTFT", [sample.first for sample in done]),
        ("TPOT", [sample.tpot for sample in done]),
        ("POST", [sample.end for sample in done]),
    ):
        row = watched.ran.rows[kind, "/v1/completions"]
        values = [value * 1000 for value in seconds if value is not None]
        assert int(row["Request Count"]) == len(values) == len(watched.trace)
        assert float(row["Average Response Time"]) == pytest.approx(np.mean(values), rel=0.001)
        # Three digits are kept, of which Locust writes the whole milliseconds.
        near = partial(pytest.approx, rel=0.006, abs=1.0)
        assert float(row["100%"]) == near(max(values))
        # Locust takes a value that was measured, others what lies between two.
        assert any(float(row["50%"]) == near(value) for value in values)
        assert min(values) - 1 <= float(row["50%"]) <= 1.006 * np.percentile(values, 75)
