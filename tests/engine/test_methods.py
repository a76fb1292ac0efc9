"""TETRIS and lookahead on real vLLM, float32: what a request gets is what the target alone delivers, and the methods do their work."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from minedraft_core.config import DrafterConfig
from minedraft_core.control import ModeOrder
from minedraft_core.embedded import prepare
from minedraft_core.types import LookaheadRecord, Mode, StepRecord
from tests.engine.harness import Engine, Job, engine, greedy
from tests.engine.test_faults import disturb
from tests.engine.workload import LONG_PROMPTS, LONG_TOKENS, TOKENS, Results, prompts, run_workload

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CAPACITY = 12
TETRIS: dict[str, Any] = {"tetris": True, "tetris_capacity": CAPACITY, "tetris_extra_proposals": 3, "tetris_turn_on_batch_size": 2}


def steps_of(target: Engine, begin: int = 0) -> list[StepRecord]:
    target.settle()
    return [record for record in target.records[begin:] if isinstance(record, StepRecord)]


def lookahead_of(target: Engine, begin: int = 0) -> tuple[int, int, int]:
    target.settle()
    records = [record for record in target.records[begin:] if isinstance(record, LookaheadRecord)]
    return sum(record.hits for record in records), sum(record.misses for record in records), sum(record.discarded for record in records)


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("pearl", {}),
        ("parallel", TETRIS),
        pytest.param("sequential", TETRIS, marks=pytest.mark.slow),
        pytest.param("pearl", TETRIS, marks=pytest.mark.slow),
    ],
    ids=["pearl", "parallel-tetris", "sequential-tetris", "pearl-tetris"],
)
def test_every_request_gets_the_same(mode: str, keys: dict[str, Any], reference: Results) -> None:
    with engine(mode, keys=keys) as speculating:
        results = run_workload(speculating, prompts())
        # One at a time: many requests are seldom accepted whole all together, and then the drafter does not go on.
        alone = speculating.generate([Job(text, greedy(LONG_TOKENS)) for text in prompts()[:3]], concurrency=1)
        steps = steps_of(speculating)
        hits, misses, discarded = lookahead_of(speculating)
        hit_metric = speculating.metrics.registry.get_sample_value("minedraft_lookahead_total", {"result": "hit"})
        dropped_metric = speculating.metrics.registry.get_sample_value("minedraft_draft_tokens_dropped_total", {"reason": "tetris"})
    assert results.plain == reference.plain
    assert results.long == reference.long
    assert [list(output.outputs[0].token_ids) for output in alone if output] == reference.long[:3]
    assert {name: value for name, value in results.special.items() if value != reference.special[name]} == {}
    assert sum(step.accepted_num for step in steps) > 0
    dropped = sum(step.dropped.get("tetris", 0) for step in steps)
    assert (dropped > 0, dropped) == (bool(keys), dropped_metric)
    if keys:
        assert max(step.verify_len for step in steps) == CAPACITY
        assert max(drafted for step in steps for drafted, _ in step.drafts) > 4, "a likely draft is verified beyond k"
    assert (hits > 0, misses > 0, discarded > 0) == ((mode == "pearl"),) * 3
    assert hits == hit_metric


def test_a_small_batch_is_verified_as_without_tetris(reference: Results) -> None:
    with engine("sequential", keys={**TETRIS, "tetris_turn_on_batch_size": 3}) as speculating:
        outputs = speculating.generate([Job(text, greedy(TOKENS)) for text in prompts()[:6]], concurrency=2)
        small = steps_of(speculating)
        begin = len(speculating.records)
        speculating.generate([Job(text, greedy(40)) for text in prompts()[:6]])
        large = steps_of(speculating, begin)
    assert [list(output.outputs[0].token_ids) for output in outputs if output] == reference.plain[:6]
    assert {max(drafted for drafted, _ in step.drafts) for step in small if step.drafts} <= {1, 2, 3, 4}
    assert max(drafted for step in large for drafted, _ in step.drafts) > 4


@pytest.mark.parametrize(
    ("mode", "keys"), [("pearl", {}), pytest.param("parallel", TETRIS, marks=pytest.mark.slow)], ids=["pearl", "tetris"]
)
def test_preemption(mode: str, keys: dict[str, Any], reference: Results) -> None:
    """Six requests that begin with 13 blocks of 32 tokens and end with 27, in a KV cache of 15."""
    with engine(mode, keys=keys, block_size=32, num_gpu_blocks_override=16, max_model_len=448) as small:
        outputs = small.generate([Job(text, greedy(LONG_TOKENS)) for text in prompts()[:LONG_PROMPTS]])
        steps = steps_of(small)
    assert [list(output.outputs[0].token_ids) for output in outputs if output] == reference.long
    assert sum(step.preempted_requests for step in steps) > 0


def test_a_dead_drafter_costs_no_request_while_it_looks_ahead(reference: Results) -> None:
    drafter = DrafterConfig(cores=(max(os.sched_getaffinity(0)),), answer_timeout=1.0, restart_backoff=0.2)
    with engine("pearl", drafter=drafter) as pearl:
        assert disturb(pearl, lambda pid: os.kill(pid, signal.SIGKILL)) == reference.long
        assert any(step.fallback_reason == "down" for step in steps_of(pearl))


def test_a_drafter_like_the_target_is_ahead_all_the_time_when_sampling_too(reference: Results) -> None:
    """The target drafts for itself: nearly all is accepted, so every next draft is begun before it is asked for."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    with engine("pearl", draft=prepare(progress=False).target) as pearl:
        (sampled,) = pearl.generate([Job(prompts()[0], params)])
        hits, misses, _ = lookahead_of(pearl)
        pearl.control.set_mode(ModeOrder(Mode.OFF, 0))
        (plain,) = pearl.generate([Job(prompts()[0], params.clone())])
        begin = len(pearl.records)
        pearl.control.set_mode(ModeOrder(Mode.PEARL, 2))
        (again,) = pearl.generate([Job(prompts()[0], params.clone())])
        assert lookahead_of(pearl, begin)[0] > 0
    assert sampled is not None
    assert plain is not None
    assert again is not None
    assert list(sampled.outputs[0].token_ids) == list(plain.outputs[0].token_ids) == list(again.outputs[0].token_ids)
    assert hits > 4 * misses


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
