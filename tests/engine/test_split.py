"""A target that is split over processes (tensor parallelism) gives what it gives whole, in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from minedraft_core.control import ModeOrder
from minedraft_core.conversion import truncate_layers
from minedraft_core.embedded import prepare
from minedraft_core.types import Mode, StepRecord
from tests.engine.harness import Engine, Job, engine, greedy

ORDERS = [ModeOrder(Mode.PARALLEL, 3), ModeOrder(Mode.SEQUENTIAL, 3), ModeOrder(Mode.PEARL, 3), ModeOrder(Mode.OFF, 0)]
JOBS = [
    *(Job(list(range(10 * index + 1, 10 * index + 20 + index)), greedy(16)) for index in range(5)),
    Job(list(range(200, 220)), greedy(16, temperature=0.8, seed=7)),
    Job(list(range(300, 330)), greedy(16, presence_penalty=0.7, logprobs=2)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target whose heads divide by four, and its first layers as drafter; the embedded model's have no such divisor."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    tokenizer = AutoTokenizer.from_pretrained(prepare(progress=False).target)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3}
    # Weights so large that no two candidates come near one another.
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.1, max_position_embeddings=256, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    truncate_layers(target, draft, 2)
    return target, draft


def outputs(running: Engine) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in running.generate(JOBS) if output]


@pytest.fixture(scope="module")
def whole(models: tuple[Path, Path]) -> list[list[int]]:
    with engine("off", model=str(models[0]), max_model_len=256) as alone:
        return outputs(alone)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_split_target_gives_what_the_whole_one_gives(models: tuple[Path, Path], whole: list[list[int]], parts: int) -> None:
    target, draft = models
    with engine("parallel", draft=draft, model=str(target), max_model_len=256, tensor_parallel_size=parts) as split:
        for order in ORDERS:
            assert split.control.set_mode(order) == order
            assert outputs(split) == whole, order.mode
        split.settle()
    steps = [record for record in split.records if isinstance(record, StepRecord)]
    for order in ORDERS[:3]:
        assert sum(step.accepted_num for step in steps if step.mode is order.mode) > 0
