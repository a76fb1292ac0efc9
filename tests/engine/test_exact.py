"""Speculation never changes what a request gets: every mode against the target alone, real vLLM, float32."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

import pytest

from minedraft_core.control import ModeOrder
from minedraft_core.types import DraftRecord, LookaheadRecord, Mode, ModeRecord, Record, StepRecord
from tests.engine.harness import Engine, Job, greedy
from tests.engine.workload import LONG_TOKENS, TOKENS, Results, prompts, run_workload

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
ORDERS = [ModeOrder(Mode.SEQUENTIAL, 2), ModeOrder(Mode.PEARL, 3), ModeOrder(Mode.OFF, 0), ModeOrder(Mode.PARALLEL, 4)]
each_mode = pytest.mark.parametrize("mode", ["sequential", "parallel", "pearl"])


def steps_of(records: Sequence[Record]) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]


@each_mode
def test_every_request_gets_the_same(mode: str, speculating: Engine, reference: Results) -> None:
    begin = speculating.switch(mode)
    results = run_workload(speculating, prompts())
    assert len(results.plain) >= 60
    assert results.plain == reference.plain
    assert results.long == reference.long
    assert {name: value for name, value in results.special.items() if value != reference.special[name]} == {}
    speculating.settle()
    steps = steps_of(speculating.records[begin:])
    assert {step.mode for step in steps} == {mode}
    assert sum(step.accepted_num for step in steps) > 0
    assert sum(step.verify_len for step in steps) > len(prompts()) * TOKENS / 2
    assert steps[-1].side_requests in ((0, 0), (1, 0), (0, 1))


@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.slow)])
@each_mode
def test_one_at_a_time(mode: str, speculating: Engine, reference: Results, every: int) -> None:
    speculating.switch(mode)
    chosen = range(0, len(prompts()), every)
    outputs = speculating.generate([Job(prompts()[index], greedy(TOKENS)) for index in chosen], concurrency=1)
    assert [list(output.outputs[0].token_ids) for output in outputs if output] == [reference.plain[index] for index in chosen]


def test_a_drafter_whose_drafts_are_accepted_is_ahead(speculating: Engine, reference: Results) -> None:
    """One request at a time: many are seldom accepted whole all together, and then the drafter does not go on."""
    speculating.switch("pearl")
    outputs = speculating.generate([Job(text, greedy(LONG_TOKENS)) for text in prompts()[:3]], concurrency=1)
    assert [list(output.outputs[0].token_ids) for output in outputs if output] == reference.long[:3]
    speculating.settle()
    ahead = [record for record in speculating.records if isinstance(record, LookaheadRecord)]
    metric = speculating.metrics.registry.get_sample_value("minedraft_lookahead_total", {"result": "hit"})
    assert metric == sum(record.hits for record in ahead)
    assert sum(record.hits for record in ahead) > 0
    assert sum(record.misses for record in ahead) > 0
    assert sum(record.discarded for record in ahead) > 0


def test_two_sides_hide_drafting_and_recover(speculating: Engine) -> None:
    """One request runs alone, a second joins, the first ends, a third joins: both sides are in use whenever two run."""
    speculating.switch("parallel")
    speculating.generate([Job(prompts()[0], greedy(8))])
    jobs = [Job(prompts()[0], greedy(40)), Job(prompts()[1], greedy(100), delay=0.3), Job(prompts()[2], greedy(60), delay=2.5)]
    speculating.settle()
    begin = len(speculating.records)
    speculating.generate(jobs)
    speculating.settle()
    steps = steps_of(speculating.records[begin:])
    sizes = [step.side_requests for step in steps]
    # A side that a request just left is filled at the next turn.
    assert sum(min(size) == 0 for size in sizes if sum(size) > 1) <= len(jobs)
    assert {sum(size) for size in sizes} >= {1, 2}
    both = [step.side for step in steps if min(step.side_requests) > 0 and not step.is_prompt_run]
    changes = sum(before != after for before, after in itertools.pairwise(both))
    assert changes >= 0.8 * (len(both) - 1)
    drafts = [record for record in speculating.records[begin:] if isinstance(record, DraftRecord)]
    assert sum(draft.hidden_us for draft in drafts) > 0


def test_modes_change_under_load(speculating: Engine, reference: Results) -> None:
    count = 24
    begin = speculating.switch("parallel")
    done: list[object] = []
    load = threading.Thread(target=lambda: done.extend(speculating.generate([Job(text, greedy(TOKENS)) for text in prompts()[:count]])))
    load.start()
    answers = []
    for order in ORDERS * 3:
        time.sleep(0.4)
        answers.append(speculating.control.set_mode(order))
    load.join()
    speculating.settle()
    records = speculating.records[begin:]
    assert answers == ORDERS * 3
    assert [list(output.outputs[0].token_ids) for output in done if output] == reference.plain[:count]
    assert {record.mode for record in records if isinstance(record, ModeRecord)} == set(Mode)
    assert {step.mode for step in steps_of(records)} >= {Mode.PARALLEL, Mode.SEQUENTIAL, Mode.PEARL}
    assert sum(step.accepted_num for step in steps_of(records)) > 0
