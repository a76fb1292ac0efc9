"""Requests that are preempted for want of KV cache get what the target alone delivers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from minedraft_core.types import StepRecord
from tests.engine.harness import Engine, Job, engine, greedy
from tests.engine.test_methods import TETRIS
from tests.engine.workload import LONG_PROMPTS, LONG_TOKENS, TOKENS, Results, prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[pytest.param({}, id="all"), pytest.param(TETRIS, id="tetris", marks=pytest.mark.slow)])
def small(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A KV cache of 17 blocks of 32 tokens; one more is never used."""
    with engine("pearl", keys=request.param, block_size=32, num_gpu_blocks_override=18, max_model_len=448) as started:
        yield started


def delivered(target: Engine, texts: Sequence[str], tokens: int) -> list[list[int]]:
    """The tokens of all requests, some of which were preempted."""
    target.settle()
    begin = len(target.records)
    outputs = target.generate([Job(text, greedy(tokens)) for text in texts])
    target.settle()
    assert sum(record.preempted_requests for record in target.records[begin:] if isinstance(record, StepRecord)) > 0
    return [list(output.outputs[0].token_ids) for output in outputs if output]


@pytest.mark.parametrize("mode", [pytest.param("sequential", marks=pytest.mark.slow), "parallel"])
def test_many_short_requests(mode: str, small: Engine, reference: Results) -> None:
    """The cache is full of prompts when their requests, all near the end of a block, need one more each."""
    small.switch(mode)
    encode = small.llm.get_tokenizer().encode
    texts = [text for text in prompts() if len(encode(text)) % 32 > 32 - TOKENS][:20]
    assert delivered(small, texts, TOKENS) == [reference.plain[prompts().index(text)] for text in texts]


@pytest.mark.parametrize("mode", ["pearl", pytest.param("parallel", marks=pytest.mark.slow)])
def test_few_long_requests(mode: str, small: Engine, reference: Results) -> None:
    """Six requests begin with 13 blocks and end with 27."""
    small.switch(mode)
    assert delivered(small, prompts()[:LONG_PROMPTS], LONG_TOKENS) == reference.long
