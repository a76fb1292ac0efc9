"""What the drafter's configuration takes from the target's, and what it must not."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from minedraft_core.config import ConfigError, DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.vllm.additional import with_own
from minedraft_core.vllm.args import draft_model_speculation
from minedraft_core.vllm.gpu.model import draft_config
from minedraft_core.vllm.gpu.weights import EightBitLinear, EightBits, eight_bits
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


def test_compiled_code_is_kept_over_starts_but_not_over_devices_or_weights(target) -> None:
    assert pickle.loads(pickle.dumps(target)).additional_config.compute_hash() == target.additional_config.compute_hash()
    before = target.compute_hash()
    target.additional_config = with_own({"other": 1}, PipelineConfig(feed_address="ipc:///tmp/new"))
    assert target.compute_hash() == before
    target.additional_config = with_own({"other": 2}, PipelineConfig())
    assert target.compute_hash() != before
    drafters = [
        (index, DrafterConfig(compiled=True, fused="layers", weights=weights)) for index in (0, 1) for weights in ("as_saved", "fp8")
    ]
    assert len({draft_config(target, torch.device("cuda", index), drafter).compute_hash() for index, drafter in drafters}) == 4


def test_eight_bits_are_for_the_linear_layers_of_a_drafter_that_has_none_yet(target, monkeypatch) -> None:
    eight = DrafterConfig(weights="fp8")
    draft = draft_config(target, torch.device("cuda", 1), eight)
    assert target.quant_config is None
    assert isinstance(draft.quant_config, EightBits)
    linear = LinearBase.__new__(LinearBase)  # the rest of it needs a group of devices
    torch.nn.Module.__init__(linear)
    with set_current_vllm_config(draft):
        assert isinstance(draft.quant_config.get_quant_method(linear, "linear"), EightBitLinear)
    assert draft.quant_config.get_quant_method(torch.nn.Embedding(2, 2), "embedding") is None
    monkeypatch.setattr(type(target), "get_quantization_config", lambda *_: EightBits())
    with pytest.raises(ConfigError, match="quantized already; remove the flag"):
        draft_config(target, torch.device("cuda", 1), eight)


@given(st.integers(0, 2**31), st.floats(1e-6, 1e6))
def test_eight_bits_are_near_the_weights(seed: int, size: float) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)) * size
    weight[2] = 0.0
    quantized, scale = eight_bits(weight)
    back = quantized.float() * scale
    largest = weight.abs().amax(dim=1, keepdim=True)
    # Three bits of mantissa, and below 2^-6 of the type steps of 2^-9.
    assert ((back - weight).abs() <= weight.abs() / 16 + largest / 448 * 2**-10 * 1.01).all()
    assert (back[2] == 0.0).all()


def test_synthetic_acceptance_is_the_same_for_fewer_drafts() -> None:
    speculative = MineDraftConfig(model="d", num_speculative_tokens=3)
    made = draft_model_speculation(PipelineConfig(speculative=speculative, drafter=DrafterConfig(synthetic_acceptance=0.5)))
    assert (made["rejection_sample_method"], made["synthetic_acceptance_rates"]) == ("synthetic", [0.5, 0.25, 0.125])
