"""What the drafter's configuration takes from the target's, and what it must not."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from vllm.config import CompilationMode
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from minedraft_core.config import DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.vllm.additional import with_own
from minedraft_core.vllm.args import draft_model_speculation
from minedraft_core.vllm.gpu.model import draft_config
from tests.gpu.simulation import write_model


@pytest.fixture
def target(tmp_path: Path):
    config = PipelineConfig(
        speculative=MineDraftConfig(model=write_model(tmp_path / "draft", 256), num_speculative_tokens=2), drafter=DrafterConfig(device=0)
    )
    made = AsyncEngineArgs(
        model=write_model(tmp_path / "target", 512),
        skip_tokenizer_init=True,
        speculative_config=draft_model_speculation(config),
        additional_config=with_own({"other": 1}, config),
    ).create_engine_config()
    made.cache_config.sliding_window = 64
    return made


def test_the_drafters_layers_and_choices_are_its_own(target) -> None:
    before = dict(target.compilation_config.static_forward_context)
    draft = draft_config(target, torch.device("cuda", 1), DrafterConfig())
    draft.compilation_config.static_forward_context["layer"] = None
    assert target.compilation_config.static_forward_context == before
    assert draft.model_config is target.speculative_config.draft_model_config
    assert (draft.attention_config.backend, target.attention_config.backend) == (AttentionBackendEnum.FLASH_ATTN, None)
    assert (draft.cache_config.sliding_window, target.cache_config.sliding_window) == (None, 64)
    assert draft.parallel_config.tensor_parallel_size == 1
    assert (draft.compilation_config.mode, draft.compilation_config.custom_ops) == (CompilationMode.NONE, ["all"])
    assert (
        draft_config(target, torch.device("cuda", 1), DrafterConfig(compiled=True)).compilation_config.mode
        == target.compilation_config.mode
    )


def test_compiled_code_is_kept_over_starts_but_not_over_devices(target) -> None:
    assert pickle.loads(pickle.dumps(target)).additional_config.compute_hash() == target.additional_config.compute_hash()
    before = target.compute_hash()
    target.additional_config = with_own({"other": 1}, PipelineConfig(feed_address="ipc:///tmp/new"))
    assert target.compute_hash() == before
    target.additional_config = with_own({"other": 2}, PipelineConfig())
    assert target.compute_hash() != before
    hashes = {draft_config(target, torch.device("cuda", index), DrafterConfig(compiled=True)).compute_hash() for index in (0, 1)}
    assert len(hashes) == 2
