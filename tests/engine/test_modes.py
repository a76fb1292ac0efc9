"""Modes and numbers of drafts change while requests run, and nothing is lost."""

from __future__ import annotations

import threading
import time

import pytest

from minedraft_core.control import ModeOrder
from minedraft_core.types import Mode, ModeRecord, StepRecord
from tests.engine.harness import Job, engine, greedy
from tests.engine.workload import TOKENS, Results, prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
ORDERS = [ModeOrder(Mode.SEQUENTIAL, 2), ModeOrder(Mode.PEARL, 3), ModeOrder(Mode.OFF, 0), ModeOrder(Mode.PARALLEL, 4)]


def test_modes_change_under_load(reference: Results) -> None:
    count = 24
    with engine("parallel") as changing:
        done: list[object] = []
        load = threading.Thread(target=lambda: done.extend(changing.generate([Job(text, greedy(TOKENS)) for text in prompts()[:count]])))
        load.start()
        answers = []
        for order in ORDERS * 3:
            time.sleep(0.4)
            answers.append(changing.control.set_mode(order))
        load.join()
        changing.settle()
    assert answers == ORDERS * 3
    assert [list(output.outputs[0].token_ids) for output in done if output] == reference.plain[:count]
    assert {record.mode for record in changing.records if isinstance(record, ModeRecord)} == set(Mode)
    steps = [record for record in changing.records if isinstance(record, StepRecord)]
    assert {step.mode for step in steps} >= {Mode.PARALLEL, Mode.SEQUENTIAL, Mode.PEARL}
    assert sum(step.accepted_num for step in steps) > 0
