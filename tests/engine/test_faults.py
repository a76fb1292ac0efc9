"""A drafter that dies or hangs costs drafts, never a request or a token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from minedraft_core.config import DrafterConfig
from minedraft_core.types import DrafterRecord, StepRecord
from tests.engine.harness import Engine, Job, engine, greedy
from tests.engine.workload import LONG_PROMPTS, LONG_TOKENS, Results, prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def impatient() -> Iterator[Engine]:
    """An engine that gives its drafter a second, and starts it anew soon."""
    drafter = DrafterConfig(cores=(max(os.sched_getaffinity(0)),), answer_timeout=1.0, restart_backoff=0.2)
    with engine("parallel", drafter=drafter) as started:
        yield started
    assert draft_processes() == []


def draft_processes() -> list[psutil.Process]:
    """The draft processes below this one."""
    alive = [process for process in psutil.Process().children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE]
    return [process for process in alive if "minedraft_core.vllm.cpu.process" in " ".join(process.cmdline())]


def disturb(target: Engine, fault: signal.Signals) -> list[list[int]]:
    """Run requests and send a signal to the draft process once they are on their way."""
    jobs = [Job(text, greedy(LONG_TOKENS)) for text in prompts()[:LONG_PROMPTS]]

    async def run() -> list[list[int]]:
        tasks = [asyncio.ensure_future(target.run(job)) for job in jobs]
        await asyncio.sleep(1.5)
        (process,) = draft_processes()
        os.kill(process.pid, fault)
        outputs = await asyncio.gather(*tasks)
        return [list(output.outputs[0].token_ids) for output in outputs if output is not None]

    return target.call(run())


@pytest.mark.parametrize(
    ("mode", "fault", "reason"),
    [("parallel", signal.SIGKILL, "died"), ("parallel", signal.SIGSTOP, "hang"), ("pearl", signal.SIGKILL, "died")],
)
def test_requests_go_on_and_the_drafter_comes_back(
    mode: str, fault: signal.Signals, reason: str, impatient: Engine, reference: Results
) -> None:
    begin = impatient.switch(mode)
    assert disturb(impatient, fault) == reference.long
    impatient.settle()
    health = [record for record in impatient.records[begin:] if isinstance(record, DrafterRecord)]
    assert (health[0].up, health[0].reason) == (False, reason)
    steps = [record for record in impatient.records[begin:] if isinstance(record, StepRecord)]
    assert {step.mode for step in steps} == {mode}
    assert "down" in {step.fallback_reason for step in steps}
    for _ in range(40):
        impatient.generate([Job(prompts()[0], greedy(16))])
        impatient.settle()
        health = [record for record in impatient.records if isinstance(record, DrafterRecord)]
        if health[-1].up:
            break
    assert health[0].up
    assert health[-1].restarted
    before = len(impatient.records)
    impatient.generate([Job(prompts()[0], greedy(16))])
    impatient.settle()
    assert sum(step.verify_len for step in impatient.records[before:] if isinstance(step, StepRecord)) > 0
    metric = impatient.metrics.registry.get_sample_value("minedraft_drafter_restarts_total")
    assert metric == sum(record.restarted for record in health)


@pytest.mark.slow
def test_a_drafter_that_cannot_load_stops_the_start(tmp_path: Path) -> None:
    # A model's folder, but without weights.
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(RuntimeError), engine("parallel", draft=tmp_path):
        pass
    assert draft_processes() == []
