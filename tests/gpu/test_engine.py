"""The draft engine with steps in the place of graphs, on CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minedraft_core.vllm.gpu import engine, kernels
from minedraft_core.vllm.gpu.engine import RING, DraftEngine, Shape
from minedraft_core.vllm.gpu.jobs import DraftJob
from tests.gpu.quiet_cuda import counting, quieten

K, BLOCK, MAX_LEN = 4, 16, 256
CPU = torch.device("cpu")


class Engine(DraftEngine):
    """Runs the steps of a draft where graphs would be replayed, and counts them."""

    steps = 0

    def _captured(self, run: Any, pool: Any) -> Any:
        def replay() -> None:
            self.steps += 1
            run()

        return SimpleNamespace(replay=replay)


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> Engine:
    quieten(monkeypatch)
    for name in ("first_inputs", "next_inputs"):
        monkeypatch.setattr(engine, name, getattr(kernels, f"{name}_reference"))
    made = Engine(counting(), CPU, None, use_fp64=False)
    made.allocate(Shape(1, K, MAX_LEN // BLOCK, BLOCK, MAX_LEN), 64)
    made.capture()
    return made


def drafts(drafter: Engine, number: int, last: int, wanted: int) -> list[int]:
    """What lands after a job for one request whose last token is given."""
    job = DraftJob(number, number % RING, frozenset(), torch.tensor([0]), 1, sampled=False)
    packed = drafter.rows(job.slot, 1)
    packed.zero_()
    packed[0, :4] = torch.tensor([last - 1, last, 9, 1], dtype=torch.int32)
    drafter.start(job, None, drafts=wanted)
    return drafter.land(job)[0].tolist()


def test_no_step_is_run_that_is_not_asked_for(drafter: Engine) -> None:
    for number, wanted in enumerate((K, 2, 1, 3, K)):
        before = drafter.steps
        got = drafts(drafter, number, 10 * number + 1, wanted)
        assert got[:wanted] == [10 * number + 2 + step for step in range(wanted)]
        assert drafter.steps - before == wanted


def test_without_drafts_nothing_is_run(drafter: Engine) -> None:
    before = drafter.steps
    drafts(drafter, 0, 5, 0)
    assert drafter.steps == before
