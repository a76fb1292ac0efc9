"""Servers as Prometheus and Grafana see them.

The scripted engine serves; vLLM's own logger and the pipeline's metrics count a made-up load.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedTokenizerFast
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, PrefixCacheStats, SchedulerStats

from minedraft_core.metrics import PipelineMetrics, ServiceLevels
from minedraft_core.types import DrafterRecord, DraftRecord, Mode, ModeRecord, RequestRecord, StepRecord
from tests.deploy.watching import KEY, Prometheus, dashboard_queries, metric_names, prometheus, rules
from tests.server.conftest import Start, serving
from tests.server.fake_engine import FakeEngine
from tests.server.tiny_engine import write_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
RECORDED = {rule["record"] for rule in rules("recording")}


class Load:
    """Counts what a server under load would count, a step at a time."""

    def __init__(self, logger: PrometheusStatLogger) -> None:
        self.pipeline = PipelineMetrics(ServiceLevels(ttft=0.1), 4)
        self._logger = logger
        self._steps = 0
        self.preempted = 0
        self.pipeline.observe(ModeRecord(Mode.PARALLEL, 4))
        self.pipeline.observe(DrafterRecord(up=True, restarted=False, reason="loaded"))

    def step(self) -> None:
        self._steps += 1
        start = self._steps * 50_000
        self.pipeline.observe(DraftRecord(self._steps, start, start + 20_000, 18_000, 2, [2, 2, 2, 2]))
        self.pipeline.observe(
            StepRecord(
                step=self._steps,
                start_us=start,
                end_us=start + 30_000,
                mode=Mode.PARALLEL,
                side=self._steps % 2,
                is_prompt_run=False,
                is_parallelised=True,
                batched_requests=2,
                preempted_requests=0,
                batched_token_num=10,
                proposed_len=8,
                verify_len=8,
                accepted_num=4,
                generated_num=6,
                measured_draft_time=0.02,
                measured_target_time=0.03,
                measured_overhead_time=0.001,
                gap_us=500,
                num_speculative_tokens=4,
                side_requests=(2, 2),
                drafter_wait_us=40,
                drafts=[(4, 3), (4, 1)],
                dropped={},
            )
        )
        self.pipeline.observe(
            RequestRecord(f"r{self._steps}", start, start + 50_000 * (1 + self._steps % 5), start + 900_000, 10, 20, "length")
        )
        iteration = IterationStats()
        iteration.num_generation_tokens = 6
        iteration.prompt_token_stats.total = 10
        iteration.num_preempted_reqs = self.preempted
        iteration.time_to_first_tokens_iter = [0.05]
        finished = FinishedRequestStats(FinishReason.LENGTH, num_prompt_tokens=10, num_generation_tokens=20)
        finished.e2e_latency, finished.queued_time, finished.mean_time_per_output_token = 0.9, 0.01, 0.04
        iteration.finished_requests = [finished]
        cache = PrefixCacheStats(requests=1, queries=10, hits=5)
        self._logger.record(SchedulerStats(4, 1, kv_cache_usage=0.4, prefix_cache_stats=cache), iteration)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Go on until the block is left."""

        async def go() -> None:
            while True:
                self.step()
                await asyncio.sleep(0.02)

        task = asyncio.create_task(go())
        try:
            yield
            assert not task.done(), task.exception()
        finally:
            task.cancel()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    args = AsyncEngineArgs(model=str(folder), dtype="float32", max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=64 << 20)
    return Load(PrometheusStatLogger(args.create_engine_config(), [0]))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def watched(load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prometheus]:
    """A Prometheus that has seen two replicas under load for some scrapes."""
    registries = (REGISTRY, load.pipeline.registry)
    async with serving(FakeEngine(tokenizer)) as start:
        ports = [(await start(api_key=[KEY, "another"], registries=registries)).port for _ in range(2)]
        async with prometheus(tmp_path_factory.mktemp("prometheus"), [f"127.0.0.1:{port}" for port in ports]) as watcher, load.running():
            await watcher.until('count_over_time(minedraft_draft_tokens_total{job="minedraft"}[1m]) > 10', 2)
            yield watcher


async def test_queries_and_rules_name_only_metrics_that_a_server_has(start: Start, load: Load) -> None:
    load.step()
    client = (await start(registries=(REGISTRY, load.pipeline.registry))).client
    text = (await client.get("/metrics")).text
    known = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples} | {"up"} | RECORDED
    expressions = [
        *(query for _, query in dashboard_queries()),
        *(rule["expr"] for name in ("alerts", "recording") for rule in rules(name)),
    ]
    for expression in expressions:
        assert metric_names(expression) <= known, expression


@needs_prometheus
async def test_two_replicas_under_load(watched: Prometheus) -> None:
    assert [series["value"][1] for series in await watched.query('up{job="minedraft"}')] == ["1", "1"]
    (target, _) = [target for target in (await watched.get("targets"))["activeTargets"] if target["labels"]["job"] == "minedraft"]
    assert target["lastError"] == ""
    for panel, expression in dashboard_queries():
        series = await watched.query(expression)
        assert series, panel
        assert any(float(entry["value"][1]) >= 0 for entry in series), panel
    groups = (await watched.get("rules"))["groups"]
    assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []
    assert sum(len(group["rules"]) for group in groups) == len(rules("alerts")) + len(rules("recording"))
    assert set(await watched.values('scrape_samples_scraped{job="minedraft"} - scrape_samples_post_metric_relabeling')) == {0.0}
    for reason in ("duplicate_timestamp", "out_of_bounds", "out_of_order"):
        assert await watched.values(f"prometheus_target_scrapes_sample_{reason}_total") == [0.0], reason


@needs_prometheus
async def test_rates_are_those_of_the_samples(watched: Prometheus) -> None:
    name = "minedraft_generation_tokens_total"
    window = await watched.query(f'{name}{{job="minedraft"}}[1m]')
    rates = await watched.values(f'rate({name}{{job="minedraft"}}[1m] @ {window[0]["values"][-1][0]}) * 60')
    gains = [float(series["values"][-1][1]) - float(series["values"][0][1]) for series in window]
    assert min(gains) > 0
    assert sorted(rates) == pytest.approx(sorted(gains), rel=0.5)
    (hidden,) = await watched.values("avg (minedraft:hidden_share:rate5m)")
    assert hidden == pytest.approx(0.9)
    (acceptance,) = await watched.values("avg (minedraft:acceptance_rate:rate10m)")
    assert acceptance == pytest.approx(0.5)


@needs_prometheus
async def test_faults_raise_their_alerts(watched: Prometheus, load: Load) -> None:
    load.preempted = 1
    load.pipeline.observe(DrafterRecord(up=False, restarted=False, reason="died", message="killed"))
    await watched.until('ALERTS{alertname="MineDraftDrafterDown", alertstate="pending"}', 2)
    load.pipeline.observe(DrafterRecord(up=True, restarted=True, reason="loaded"))
    await watched.until('ALERTS{alertname="MineDraftDrafterRestarting", alertstate="firing"}', 2)
    await watched.until('ALERTS{alertname="MineDraftPreemptions", alertstate="firing"}', 2)
    load.preempted = 0
