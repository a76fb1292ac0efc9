"""A drafter that dies or hangs costs drafts, never a request or a token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import psutil
import pytest

from minedraft_core.config import DrafterConfig
from minedraft_core.types import DrafterRecord, StepRecord
from tests.engine.harness import Engine, Job, engine, greedy
from tests.engine.workload import LONG_PROMPTS, LONG_TOKENS, Results, prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def draft_processes() -> list[psutil.Process]:
    """The draft processes below this one."""
    alive = [process for process in psutil.Process().children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE]
    return [process for process in alive if "minedraft_core.vllm.cpu.process" in " ".join(process.cmdline())]


def disturb(target: Engine, fault: Callable[[int], None]) -> list[list[int]]:
    """Run requests and do `fault` to the draft process once they are on their way."""
    jobs = [Job(text, greedy(LONG_TOKENS)) for text in prompts()[:LONG_PROMPTS]]

    async def run() -> list[list[int]]:
        tasks = [asyncio.ensure_future(target.run(job)) for job in jobs]
        await asyncio.sleep(1.5)
        (process,) = draft_processes()
        fault(process.pid)
        outputs = await asyncio.gather(*tasks)
        return [list(output.outputs[0].token_ids) for output in outputs if output is not None]

    return target.call(run())


@pytest.mark.parametrize(("fault", "reason"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "hang")])
def test_requests_go_on_and_the_drafter_comes_back(fault: signal.Signals, reason: str, reference: Results) -> None:
    drafter = DrafterConfig(cores=(max(os.sched_getaffinity(0)),), answer_timeout=1.0, restart_backoff=0.2)
    with engine("parallel", drafter=drafter) as parallel:
        assert disturb(parallel, lambda pid: os.kill(pid, fault)) == reference.long
        parallel.settle()
        health = [record for record in parallel.records if isinstance(record, DrafterRecord)]
        assert [record.up for record in health[:2]] == [True, False]
        assert health[1].reason == reason
        alone = [step for step in parallel.records if isinstance(step, StepRecord) and step.fallback_reason is not None]
        assert {"down"} <= {step.fallback_reason for step in alone}
        for _ in range(40):
            parallel.generate([Job(prompts()[0], greedy(16))])
            parallel.settle()
            health = [record for record in parallel.records if isinstance(record, DrafterRecord)]
            if health[-1].up:
                break
        assert health[-1].restarted
        before = len(parallel.records)
        parallel.generate([Job(prompts()[0], greedy(16))])
        parallel.settle()
        assert sum(step.verify_len for step in parallel.records[before:] if isinstance(step, StepRecord)) > 0
        text = parallel.metrics.registry.get_sample_value("minedraft_drafter_restarts_total")
        assert text == sum(record.restarted for record in health)
    assert draft_processes() == []


@pytest.mark.slow
def test_a_drafter_that_cannot_load_stops_the_start(tmp_path: os.PathLike[str]) -> None:
    with pytest.raises(RuntimeError), engine("parallel", draft=tmp_path / "nothing"):
        pass
    assert draft_processes() == []
