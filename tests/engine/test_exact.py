"""Speculation never changes what a request gets: every mode against the target alone, real vLLM, float32."""

from __future__ import annotations

import itertools

import pytest

from minedraft_core.types import DraftRecord, StepRecord
from tests.engine.harness import Engine, Job, engine, greedy
from tests.engine.workload import TOKENS, Results, prompts, run_workload

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_every_request_gets_the_same(speculating: Engine, reference: Results) -> None:
    results = run_workload(speculating, prompts())
    assert len(results.plain) >= 60
    assert results.plain == reference.plain
    assert results.long == reference.long
    assert {name: value for name, value in results.special.items() if value != reference.special[name]} == {}
    speculating.settle()
    steps = [record for record in speculating.records if isinstance(record, StepRecord)]
    assert sum(step.accepted_num for step in steps) > 0
    assert sum(step.verify_len for step in steps) > len(prompts()) * TOKENS / 2


@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_one_at_a_time(speculating: Engine, reference: Results, every: int) -> None:
    chosen = range(0, len(prompts()), every)
    outputs = speculating.generate([Job(prompts()[index], greedy(TOKENS)) for index in chosen], concurrency=1)
    assert [list(output.outputs[0].token_ids) for output in outputs if output] == [reference.plain[index] for index in chosen]


def test_nothing_is_left_behind(speculating: Engine) -> None:
    speculating.settle()
    last = [record for record in speculating.records if isinstance(record, StepRecord)][-1]
    assert last.side_requests in ((0, 0), (1, 0), (0, 1))


@pytest.mark.parametrize("mode", [pytest.param("sequential", marks=pytest.mark.slow), "parallel"])
def test_preemption(mode: str, reference: Results) -> None:
    """A KV cache of 24 blocks of 32 tokens is full of prompts when their requests, all near the end of a block, need one more each."""
    with engine(mode, block_size=32, num_gpu_blocks_override=24, max_model_len=256) as small:
        encode = small.llm.get_tokenizer().encode
        texts = [text for text in prompts() if len(encode(text)) % 32 > 32 - TOKENS][:20]
        outputs = small.generate([Job(text, greedy(TOKENS)) for text in texts])
        small.settle()
    expected = [reference.plain[prompts().index(text)] for text in texts]
    assert [list(output.outputs[0].token_ids) for output in outputs if output] == expected
    assert sum(record.preempted_requests for record in small.records if isinstance(record, StepRecord)) > 0


def test_two_sides_hide_drafting_and_recover() -> None:
    """One request runs alone, a second joins, the first ends, a third joins: both sides are in use whenever two run."""
    with engine("parallel", dtype="bfloat16") as parallel:
        parallel.generate([Job(prompts()[0], greedy(8))])
        jobs = [Job(prompts()[0], greedy(40)), Job(prompts()[1], greedy(100), delay=0.3), Job(prompts()[2], greedy(60), delay=2.5)]
        parallel.settle()
        parallel.records.clear()
        parallel.generate(jobs)
        parallel.settle()
        steps = [record for record in parallel.records if isinstance(record, StepRecord)]
    sizes = [step.side_requests for step in steps]
    # A side that a request just left is filled at the next turn.
    assert sum(min(size) == 0 for size in sizes if sum(size) > 1) <= len(jobs)
    assert {sum(size) for size in sizes} >= {1, 2}
    both = [step.side for step in steps if min(step.side_requests) > 0 and not step.is_prompt_run]
    changes = sum(before != after for before, after in itertools.pairwise(both))
    assert changes >= 0.8 * (len(both) - 1)
    drafts = [record for record in parallel.records if isinstance(record, DraftRecord)]
    assert sum(draft.hidden_us for draft in drafts) > 0
