"""How products are cut, and which models have layers that can be fused."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from minedraft_core.config import ConfigError, DrafterConfig
from minedraft_core.vllm.gpu import fused
from minedraft_core.vllm.gpu.decode import DraftStep, Heads
from minedraft_core.vllm.gpu.fused import FusedModel
from minedraft_core.vllm.gpu.layers import UnsupportedError, _head, read_layers
from minedraft_core.vllm.gpu.methods import SeparateModel
from minedraft_core.vllm.gpu.model import DraftModel
from minedraft_core.vllm.gpu.products import MOST_ROWS, Matrix, Products, padded, tile
from minedraft_core.vllm.gpu.weights import EightBitLinear, eight_bits

HEADS = Heads(4, 2, 16, 4)


@given(
    st.integers(1, MOST_ROWS),
    st.integers(1, 40000),
    st.integers(1, 2000).map(lambda steps: 16 * steps),
    st.sampled_from((1, 2, 4)),
    st.integers(1, 300),
    st.booleans(),
)
def test_every_output_and_the_whole_depth_are_covered(
    num_rows: int, outputs: int, depth: int, size: int, multiprocessors: int, gated: bool
) -> None:
    rows = padded(num_rows)
    assert rows >= max(8, num_rows)
    cut = tile(rows, outputs, depth, size, multiprocessors, gated=gated)
    assert depth % cut.depth == 0
    assert 1 <= cut.parts <= depth // cut.depth
    assert cut.depth % cut.slices == 0
    assert cut.depth // cut.slices >= 16
    # Also in the shared memory of a multiprocessor that has 99 KiB.
    assert cut.stages >= 2
    assert cut.depth * (cut.stages - 1) * (cut.outputs * size * (1 + gated) + 2 * rows) <= 100_000


def test_a_card_is_filled_where_the_weights_are_large_enough() -> None:
    for outputs, depth in ((4096, 2048), (2048, 2048), (2048, 6144), (1024, 3072)):
        cut = tile(16, outputs, depth, 2, 132, gated=False)
        assert -(-outputs // cut.outputs) * cut.parts >= 0.9 * 132


def test_there_is_room_for_the_parts_of_every_product() -> None:
    products = Products(132, chained=False)
    matrices = [(Matrix(torch.zeros(outputs, depth)), gated) for outputs, depth, gated in ((64, 512, False), (200, 48, True))]
    workspace = products.workspace(matrices, torch.device("cpu"))
    for matrix, gated in matrices:
        for num_rows in range(1, MOST_ROWS + 1):
            cut = products.tile(padded(num_rows), matrix, gated=gated)
            blocks = -(-matrix.weight.shape[0] // (1 + gated) // cut.outputs)
            assert len(workspace.arrived) >= blocks
            if cut.parts > 1:
                assert len(workspace.sums) >= blocks * cut.parts * 2 * padded(num_rows) * cut.outputs


def test_other_models_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="is a Linear, not one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        read_layers(nn.Linear(2, 2), HEADS, chained=False)


def model_with_a_head(**differing: Any) -> Any:
    """What is read of a model's head: plain but for what differs."""
    processor = {"scale": 1.0, "soft_cap": None, "head_dtype": torch.bfloat16, "org_vocab_size": 40}
    head = {"weight": nn.Parameter(torch.randn(64, 32).bfloat16()), "quant_method": UnquantizedEmbeddingMethod(), "bias": None}
    processor, head = ({name: differing.get(name, value) for name, value in part.items()} for part in (processor, head))
    return SimpleNamespace(logits_processor=SimpleNamespace(**processor), lm_head=SimpleNamespace(**head))


@pytest.mark.parametrize("differing", [{}, {"head_dtype": None}, {"quant_method": UnquantizedLinearMethod()}])
def test_a_head_that_is_a_plain_product_is_fused(differing: dict[str, Any]) -> None:
    model = model_with_a_head(**differing)
    head = _head(model, eight=False)
    assert head is not None
    assert head.vocab_size == 40
    assert head.matrix.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert head.matrix.scales is None


@pytest.mark.parametrize(
    "differing",
    [
        {"scale": 0.5},
        {"soft_cap": 30.0},
        {"head_dtype": torch.float32},
        {"bias": torch.zeros(64)},
        {"quant_method": EightBitLinear()},
        {"weight": nn.Parameter(torch.zeros(64, 40))},
    ],
    ids=lambda differing: next(iter(differing)),
)
def test_a_head_that_does_more_is_left_to_vllm(differing: dict[str, Any]) -> None:
    assert _head(model_with_a_head(**differing), eight=False) is None


def test_a_head_is_quantized_as_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minedraft_core.vllm.gpu.layers._HEAD_ROWS", 24)
    model = model_with_a_head()
    head = _head(model, eight=True)
    assert head is not None
    assert head.matrix.scales is not None
    weight, scales = eight_bits(model.lm_head.weight.data)
    torch.testing.assert_close(head.matrix.weight.float(), weight.float(), rtol=0, atol=0)
    torch.testing.assert_close(head.matrix.scales, scales.flatten(), rtol=0, atol=0)
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_matrices_have_rows_of_whole_tiles() -> None:
    assert Matrix(torch.zeros(3, 32)).supported
    assert not Matrix(torch.zeros(3, 40)).supported
    assert not Matrix(torch.zeros(32, 3).t()).supported


HOPPER, ADA = (9, 0), (8, 9)


def loaded(
    monkeypatch: pytest.MonkeyPatch, drafter: DrafterConfig, capability: tuple[int, int], refusal: str | None = None
) -> tuple[Any, list[Any]]:
    """The draft model, and with what each was made that was tried; fused layers refuse it where there is a reason."""
    tried = []

    class Fused(SimpleNamespace):
        def __init__(self, made_with: str, *_: Any) -> None:
            tried.append(("FusedModel", made_with))
            if refusal is not None:
                raise ConfigError(refusal)

    class Plain(SimpleNamespace):
        def __init__(self, made_with: str, *_: Any) -> None:
            tried.append(("DraftModel", made_with))

    monkeypatch.setattr(fused, "FusedModel", Fused)
    monkeypatch.setattr(fused, "DraftModel", Plain)
    monkeypatch.setattr(fused, "draft_config", lambda _config, _device, drafter: drafter.fused)
    monkeypatch.setattr("minedraft_core.vllm.gpu.methods.single_rank_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return SeparateModel().load(nn.Identity(), None, torch.device("cuda", 0), drafter), tried  # type: ignore[arg-type]


LAYERS, NONE = ("FusedModel", "layers"), ("DraftModel", "none")


@pytest.mark.parametrize(
    ("drafter", "capability", "expected"),
    [
        (DrafterConfig(fused="none"), HOPPER, NONE),
        (DrafterConfig(fused="attention"), HOPPER, ("DraftModel", "attention")),
        (DrafterConfig(fused="layers"), ADA, LAYERS),
        (DrafterConfig(), HOPPER, LAYERS),
        (DrafterConfig(), ADA, NONE),
        (DrafterConfig(), (10, 0), NONE),
        (DrafterConfig(compiled=True), HOPPER, NONE),
        (DrafterConfig(weights="fp8"), ADA, LAYERS),
    ],
)
def test_the_class_of_a_draft_model_follows_the_configuration_and_the_gpu(
    drafter: DrafterConfig, capability: tuple[int, int], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded(monkeypatch, drafter, capability)[1] == [expected]


def test_what_fused_layers_cannot_run_is_run_without_them_where_they_were_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = loaded(monkeypatch, DrafterConfig(), HOPPER, "it has experts")
    assert tried == [LAYERS, NONE]
    assert model.refusal == "it has experts"
    for asked in (DrafterConfig(fused="layers"), DrafterConfig(weights="fp8")):
        with pytest.raises(ConfigError, match="it has experts"):
            loaded(monkeypatch, asked, HOPPER, "it has experts")


@pytest.mark.parametrize(
    ("heads", "refusal", "line"),
    [
        (None, None, "draft steps run in vLLM's kernels"),
        (HEADS, None, "draft steps run in vLLM's kernels and fused attention"),
        (None, "it has experts", "draft steps run in vLLM's kernels (it has experts)"),
    ],
)
def test_the_start_says_what_draft_steps_run_in(heads: Any, refusal: str | None, line: str) -> None:
    model: Any = object.__new__(DraftModel)
    model._heads, model.refusal = heads, refusal
    assert model.describe() == line
    layers: Any = object.__new__(FusedModel)
    layers._stack = SimpleNamespace(most_rows=16)
    assert layers.describe() == "draft steps of up to 16 tokens run in fused layers"


@pytest.mark.parametrize(("tokens", "kernels"), [(4, "ours"), (5, "vLLM's")])
def test_steps_of_more_tokens_run_as_vllm_runs_them(tokens: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftModel, "_forward", lambda *_: "vLLM's")
    monkeypatch.setattr(DraftModel, "logits", lambda *_: "vLLM's")
    model: Any = object.__new__(FusedModel)
    head = SimpleNamespace(logits=lambda *_: "ours")
    model._stack = SimpleNamespace(most_rows=4, head=head, products=None, run=lambda *_: "ours")
    model._model = SimpleNamespace(embed_input_ids=lambda ids: ids, model=SimpleNamespace(norm=lambda states: states))
    model._workspace = None
    some: Any = None
    step = DraftStep(HEADS, some, some, some, torch.zeros(tokens, dtype=torch.int64))
    assert model._forward({"input_ids": some, "positions": some}, step) == kernels
    assert model.logits(torch.zeros(tokens, 8)) == kernels
    model._stack.head = None
    assert model.logits(torch.zeros(tokens, 8)) == "vLLM's"
