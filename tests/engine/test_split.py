"""A target that is split over processes (tensor parallelism) gives what it gives whole, in every mode."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from minedraft_core.control import ModeOrder
from minedraft_core.conversion import truncate_layers
from minedraft_core.embedded import prepare
from minedraft_core.types import Mode, StepRecord
from tests.engine.harness import Engine, Job, engine, greedy
from tests.engine.server_process import Served, serving, until

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


def left_behind() -> set[Path]:
    """Memory that parts share by name."""
    return set(Path("/dev/shm").glob("vllm_dist_*"))


@contextmanager
def split_server(folder: Path, models: tuple[Path, Path]) -> Iterator[tuple[Served, Future[httpx.Response]]]:
    """A server of a target in two parts, and a request that it is busy with. Nothing of it may be left at the end."""
    target, draft = models
    speculative = {"model": str(draft), "num_speculative_tokens": 3, "is_parallel": True}
    flags = ["--enforce-eager", "--kv-cache-memory-bytes", "50000000", "--max-model-len", "256", "--max-num-seqs", "4"]
    names = ["--model", str(target), "--served-model-name", "split", "--speculative-config", json.dumps(speculative)]
    before = left_behind()
    with serving(folder, *names, *flags, "--tensor-parallel-size", "2") as served, ThreadPoolExecutor() as pool:
        processes = served.below()
        body = {"model": "split", "prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        asked = pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=120)
        until(lambda: served.metric("vllm:num_requests_running") == 1)
        yield served, asked
        assert not psutil.wait_procs(processes, timeout=10)[1]
    assert left_behind() == before


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
    before = left_behind()
    with engine("parallel", draft=draft, model=str(target), max_model_len=256, tensor_parallel_size=parts) as split:
        assert left_behind() == before, "what parts share has no name that a killed one would leave behind"
        for order in ORDERS:
            assert split.control.set_mode(order) == order
            assert outputs(split) == whole, order.mode
        split.settle()
    steps = [record for record in split.records if isinstance(record, StepRecord)]
    for order in ORDERS[:3]:
        assert sum(step.accepted_num for step in steps if step.mode is order.mode) > 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_every_process_lets_requests_finish(models: tuple[Path, Path], tmp_path: Path, number: signal.Signals) -> None:
    with split_server(tmp_path, models) as (served, asked):
        os.killpg(served.process.pid, number)
        response = asked.result()
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 200
        assert served.process.wait(30) == 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_death_of_a_part_ends_the_server_at_once(models: tuple[Path, Path], tmp_path: Path) -> None:
    with split_server(tmp_path, models) as (served, asked):
        killed = time.monotonic()
        next(process for process in served.below() if "Worker" in process.name()).kill()
        response = asked.result()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        # vLLM alone waits nine seconds for the part that is left.
        assert time.monotonic() - killed < 6
        assert served.process.wait(30) == 1
