"""TETRIS, draft lengths by batch size and a draft temperature on real vLLM, float32: outputs are the target's, and each method works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from minedraft_core.control import ModeOrder
from minedraft_core.embedded import prepare
from minedraft_core.types import DRAFT_LIMIT, LookaheadRecord, Mode, StepRecord
from tests.engine.harness import Engine, Job, engine, greedy
from tests.engine.workload import LONG_TOKENS, TOKENS, Results, prompts, run_workload

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CAPACITY = 12
TETRIS: dict[str, Any] = {"tetris": True, "tetris_capacity": CAPACITY, "tetris_extra_proposals": 3, "tetris_turn_on_batch_size": 3}


def steps_of(target: Engine, begin: int = 0) -> list[StepRecord]:
    target.settle()
    return [record for record in target.records[begin:] if isinstance(record, StepRecord)]


def lookahead_of(target: Engine, begin: int = 0) -> tuple[int, int, int]:
    target.settle()
    records = [record for record in target.records[begin:] if isinstance(record, LookaheadRecord)]
    return sum(record.hits for record in records), sum(record.misses for record in records), sum(record.discarded for record in records)


@pytest.fixture(scope="module")
def tetris() -> Iterator[Engine]:
    with engine("parallel", keys=TETRIS) as started:
        yield started


@pytest.mark.parametrize(
    "mode", ["parallel", pytest.param("sequential", marks=pytest.mark.slow), pytest.param("pearl", marks=pytest.mark.slow)]
)
def test_every_request_gets_the_same(mode: str, tetris: Engine, reference: Results) -> None:
    begin = tetris.switch(mode)
    results = run_workload(tetris, prompts())
    # One at a time: many requests are seldom accepted whole all together, and then the drafter does not go on.
    ahead = prompts()[:3] if mode == "pearl" else []
    alone = tetris.generate([Job(text, greedy(LONG_TOKENS)) for text in ahead], concurrency=1)
    steps = steps_of(tetris, begin)
    assert results.plain == reference.plain
    assert results.long == reference.long
    assert [list(output.outputs[0].token_ids) for output in alone if output] == reference.long[: len(ahead)]
    assert {name: value for name, value in results.special.items() if value != reference.special[name]} == {}
    assert sum(step.accepted_num for step in steps) > 0
    assert sum(step.dropped.get("tetris", 0) for step in steps) > 0
    dropped_metric = tetris.metrics.registry.get_sample_value("minedraft_draft_tokens_dropped_total", {"reason": "tetris"})
    assert sum(step.dropped.get("tetris", 0) for step in steps_of(tetris)) == dropped_metric
    assert max(step.verify_len for step in steps) == CAPACITY
    assert max(drafted for step in steps for drafted, _ in step.drafts) > 4, "a likely draft is verified beyond k"
    assert [count > 0 for count in lookahead_of(tetris, begin)] == [mode == "pearl"] * 3


def test_a_small_batch_is_verified_as_without_tetris(tetris: Engine, reference: Results) -> None:
    begin = tetris.switch("sequential")
    outputs = tetris.generate([Job(text, greedy(TOKENS)) for text in prompts()[:6]], concurrency=2)
    small = steps_of(tetris, begin)
    begin = len(tetris.records)
    tetris.generate([Job(text, greedy(40)) for text in prompts()[:6]])
    large = steps_of(tetris, begin)
    assert [list(output.outputs[0].token_ids) for output in outputs if output] == reference.plain[:6]
    assert {max(drafted for drafted, _ in step.drafts) for step in small if step.drafts} <= {1, 2, 3, 4}
    assert max(drafted for step in large for drafted, _ in step.drafts) > 4


@pytest.fixture(scope="module")
def by_batch() -> Iterator[Engine]:
    with engine("parallel", keys={"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 6, 2], [7, 64, 1]]}) as started:
        yield started


@pytest.mark.parametrize(
    "mode", ["parallel", pytest.param("sequential", marks=pytest.mark.slow), pytest.param("pearl", marks=pytest.mark.slow)]
)
def test_larger_batches_get_fewer_drafts_and_every_request_the_same(mode: str, by_batch: Engine, reference: Results) -> None:
    begin = by_batch.switch(mode)
    results = run_workload(by_batch, prompts())
    alone = by_batch.generate([Job(text, greedy(TOKENS)) for text in prompts()[:4]], concurrency=1)
    assert results.plain == reference.plain
    assert results.long == reference.long
    assert {name: value for name, value in results.special.items() if value != reference.special[name]} == {}
    assert [list(output.outputs[0].token_ids) for output in alone if output] == reference.plain[:4]
    lengths: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for step in steps_of(by_batch, begin):
        if len(step.drafts) == 1 or len(step.drafts) > 6:
            lengths[len(step.drafts) == 1].update(drafted for drafted, _ in step.drafts)
    assert [lengths[small].most_common(1)[0][0] for small in (True, False)] == [4, 1]


def test_requests_without_drafts_make_a_batch_larger(by_batch: Engine, reference: Results) -> None:
    begin = by_batch.switch("sequential")
    plain, drafted = greedy(TOKENS, extra_args={DRAFT_LIMIT: 0}), greedy(TOKENS)
    outputs = by_batch.generate([Job(text, drafted if index < 2 else plain) for index, text in enumerate(prompts()[:9])], concurrency=9)
    assert [list(output.outputs[0].token_ids) for output in outputs if output] == reference.plain[:9]
    large = [step for step in steps_of(by_batch, begin) if step.batched_requests > 6 and not step.is_prompt_run]
    assert Counter(length for step in large for length, _ in step.drafts).most_common(1)[0][0] == 1


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.4, marks=pytest.mark.slow)])
def test_the_drafts_temperature_changes_drafts_and_no_output(temperature: float) -> None:
    jobs = [
        Job(text, SamplingParams(temperature=1.0, seed=number, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY))
        for number, text in enumerate(prompts()[:4])
    ]
    with engine("sequential", keys={"draft_temperature": temperature}, draft=prepare(progress=False).target) as cold:
        drafted = cold.generate(jobs)
        accepted = sum(step.accepted_num for step in steps_of(cold)) / sum(step.verify_len for step in steps_of(cold))
        cold.control.set_mode(ModeOrder(Mode.OFF, 0))
        plain = cold.generate(jobs)
    assert [list(output.outputs[0].token_ids) for output in drafted if output] == [
        list(output.outputs[0].token_ids) for output in plain if output
    ]
    # At the request's own temperature the same drafter is accepted nearly always.
    assert 0.05 < accepted < 0.95
