"""EAGLE heads on CPU as far as that goes: their numbers, what fits and what does not, what the scheduler does for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from minedraft_core.config import ConfigError, DrafterConfig, MineDraftConfig
from minedraft_core.vllm.gpu.eagle import ends
from minedraft_core.vllm.gpu.eagle.ends import TargetEnds, target_ends
from minedraft_core.vllm.gpu.eagle.engine import EagleEngine
from minedraft_core.vllm.gpu.eagle.model import EagleModel, head_config
from minedraft_core.vllm.gpu.eagle.speculator import EagleSpeculator
from minedraft_core.vllm.gpu.engine import DraftEngine
from minedraft_core.vllm.gpu.layout import Reserve, longest_context
from minedraft_core.vllm.gpu.lookahead import LookaheadEngine
from minedraft_core.vllm.gpu.methods import method_of
from tests.gpu.simulation import BLOCK, Loop, request, scheduler

ROOT = Path(__file__).parents[2]


def run(module: str, method: str) -> str:
    """In a process of its own: vLLM's process groups are for good."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", f"tests.gpu.{module}", method]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_drafts_are_those_of_the_weights(method: str) -> None:
    assert "accepted" in run("eagle_numbers", method)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_so_are_those_of_vllm(method: str) -> None:
    assert "as expected" in run("eagle_native", method)


def test_a_method_has_its_classes() -> None:
    plain, ahead = MineDraftConfig(), MineDraftConfig(is_parallel=True, force_pearl=True)
    assert (method_of("eagle3", plain).engine, method_of("eagle", plain).speculator) == (EagleEngine, EagleSpeculator)
    assert [method_of("draft_model", config).engine for config in (plain, ahead)] == [DraftEngine, LookaheadEngine]


def test_a_head_takes_the_targets_length() -> None:
    assert longest_context("draft_model", 2048, 8192) == 2048
    assert longest_context("draft_model", 8192, 2048) == 2048
    assert longest_context("eagle3", 2048, 8192) == 8192


def hashed(made: Request) -> Request:
    """A request whose blocks can be found in the prefix cache."""
    made._block_hasher = get_request_block_hasher(BLOCK, sha256)
    made.update_block_hashes()
    return made


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_heads_are_scheduled_for(tmp_path: Path, mode: str) -> None:
    """Chunked prompts, contexts past the head's own length, and vLLM's rule that the last cached block of a prompt runs again."""
    made = scheduler(tmp_path, mode, k=4, draft_length=40, keys={"method": "eagle"}, enable_prefix_caching=True, max_num_batched_tokens=64)
    assert made.use_eagle_block_drop
    loop = Loop(made)
    for index in range(4):
        made.add_request(hashed(request(f"r{index}", prompt=100, tokens=20 + index)))
    loop.run(30)
    made.add_request(hashed(request("again", prompt=100, tokens=12)))
    loop.run(80)
    assert loop.tokens == {"r0": 20, "r1": 21, "r2": 22, "r3": 23, "again": 12}
    drafted = [name for output in loop.passes for name in output.scheduled_spec_decode_tokens]
    assert drafted.count("r0") > 3
    cached = next(new.num_computed_tokens for output in loop.passes for new in output.scheduled_new_reqs if new.req_id == "again")
    assert cached == 64, "of the three whole blocks the last one runs again"


def part(rows: int, value: float) -> VocabParallelEmbedding:
    end = VocabParallelEmbedding(rows, 4, disable_tp=True, params_dtype=torch.float32)
    end.weight.data.fill_(value)
    return end


def target_of(first: nn.Module, last: nn.Module) -> Any:
    class Target(nn.Module):
        def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
            return (2, 4, 5)

    target = Target()
    target.model = nn.Module()
    target.model.embed_tokens, target.lm_head = first, last
    return target


def config_of(method: str) -> Any:
    speculative = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(), model="head"))
    return SimpleNamespace(model_config=SimpleNamespace(get_hidden_size=lambda: 4), speculative_config=speculative)


CPU = torch.device("cpu")


def test_the_ends_of_a_target_are_gathered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hold parts of both; the first one gets them in order."""
    gathered: list[torch.Tensor] = []

    def gather(weight: torch.Tensor, dst: int, dim: int) -> torch.Tensor:
        gathered.append(weight)
        return torch.cat([weight, weight + 1], dim=dim)

    monkeypatch.setattr(ends, "get_tp_group", lambda: SimpleNamespace(gather=gather))
    found = target_ends(target_of(part(64, 1.0), part(64, 5.0)), config_of("eagle3"), CPU)
    assert found is not None
    assert found.embedding[:, 0].tolist() == [1.0] * 64 + [2.0] * 64
    assert found.head[:, 0].tolist() == [5.0] * 64 + [6.0] * 64
    assert found.width == 12
    tied = part(64, 1.0)
    gathered.clear()
    found = target_ends(target_of(tied, tied), config_of("eagle"), CPU)
    assert found.width == 4
    assert found.head is found.embedding
    assert len(gathered) == 1
    assert target_ends(target_of(tied, tied), config_of("eagle"), None) is None, "the other ranks send their parts alone"
    assert len(gathered) == 2
    assert target_ends(target_of(nn.Linear(4, 4), tied), config_of("eagle"), CPU).embedding is None
    with pytest.raises(ConfigError, match="does not show its embedding"):
        target_ends(nn.Module(), config_of("eagle"), CPU)


def head_of(method: str = "eagle", inputs: int = 8, vocabulary: int = 64, own: int | None = None, load: str = "auto") -> EagleModel:
    """A head of hidden size 4 as vLLM has loaded it, with nothing of its own."""
    inner = nn.Module()
    inner.fc = SimpleNamespace(input_size=inputs, output_size=4)
    inner.embed_tokens = part(vocabulary, 0.0)
    model = nn.Module()
    model.model, model.config = inner, SimpleNamespace(vocab_size=vocabulary, draft_vocab_size=own or vocabulary, hidden_size=4)
    head = object.__new__(EagleModel)
    head._model, head.width, head.vocab_size = model, 12 if method == "eagle3" else 4, 64
    head.config = config_of(method)
    head.config.model_config.dtype, head.config.load_config = torch.float32, SimpleNamespace(load_format=load)
    return head


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (head_of(inputs=10), "reads hidden states of 6 columns, the target's have 4"),
        (head_of("eagle3", inputs=8), "reads hidden states of 8 columns, the target's have 12"),
        (head_of(vocabulary=128), "knows 128 tokens, the target 64"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(head: EagleModel, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"the head head {reason}"):
        head._check()


def test_a_head_without_ends_of_its_own_gets_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole(VocabParallelEmbedding):
        def __init__(self, rows: int, columns: int, **extra: Any) -> None:
            super().__init__(rows, columns, disable_tp=True, **extra)

    monkeypatch.setattr("minedraft_core.vllm.gpu.eagle.model.ParallelLMHead", Whole)
    first, last = torch.ones(64, 4), torch.full((64, 4), 2.0)
    head = head_of()
    head._check()
    head._complete(TargetEnds(first, last, 4))
    assert head._model.model.embed_tokens.weight.data_ptr() == first.data_ptr(), "on the same device nothing is copied"
    assert head._model.lm_head.weight.data_ptr() == last.data_ptr()
    own = head_of()
    own._model.has_own_embed_tokens = own._model.has_own_lm_head = True
    own._complete(TargetEnds(None, None, 4))
    assert own._model.model.embed_tokens.weight[0, 0] == 0.0
    with pytest.raises(ConfigError, match="no embedding of its own, and the target's is quantized"):
        head_of()._complete(TargetEnds(None, None, 4))
    with pytest.raises(ConfigError, match="no lm_head of its own, and the target's is of shape"):
        head_of()._complete(TargetEnds(first, torch.ones(64, 8), 4))
    with pytest.raises(ConfigError, match="a vocabulary of its own, 32 tokens, and no lm_head"):
        head_of(own=32)._complete(TargetEnds(first, last, 4))
    head_of(own=32, load="dummy")._complete(TargetEnds(first, last, 4))


def test_what_travels_is_reserved() -> None:
    head = head_of("eagle3", inputs=12)
    row = 12 * 4
    assert head.reserve(8, 3, 100) == Reserve(target=4 * (8 * 4 * row + 100 * row), drafter=8 * 4 * row + 3 * 100 * row)


def test_a_heads_configuration_keeps_the_targets_model(tmp_path: Path) -> None:
    config = scheduler(tmp_path, "sequential", keys={"method": "eagle"}).vllm_config
    made = head_config(config, torch.device("cuda", 1), DrafterConfig())
    assert made.model_config is config.model_config
    assert made.compilation_config.static_forward_context == {}
    assert made.parallel_config.tensor_parallel_size == 1
