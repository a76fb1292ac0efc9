"""How products are cut, and which models have layers that can be fused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minedraft_core.config import DrafterConfig
from minedraft_core.vllm.gpu.decode import Heads
from minedraft_core.vllm.gpu.layers import UnsupportedError, read_layers
from minedraft_core.vllm.gpu.methods import SeparateModel
from minedraft_core.vllm.gpu.products import MOST_ROWS, Matrix, Products, padded, tile

HEADS = Heads(4, 2, 16, 4)


@given(
    st.integers(1, MOST_ROWS),
    st.integers(1, 40000),
    st.integers(1, 2000).map(lambda steps: 16 * steps),
    st.sampled_from((1, 2, 4)),
    st.integers(1, 300),
    st.booleans(),
    st.booleans(),
)
def test_every_output_and_the_whole_depth_are_covered(
    num_rows: int, outputs: int, depth: int, size: int, multiprocessors: int, gated: bool, normed: bool
) -> None:
    rows = padded(num_rows)
    assert rows >= max(8, num_rows)
    cut = tile(rows, outputs, depth, size, multiprocessors, gated=gated, normed=normed)
    assert depth % cut.depth == 0
    assert 1 <= cut.parts <= depth // cut.depth
    assert cut.depth % cut.slices == 0
    assert cut.depth // cut.slices >= 16
    assert not cut.early or (depth % (cut.depth * cut.parts) == 0 and cut.early * cut.depth * cut.parts <= depth)
    # Also in the shared memory of a multiprocessor that has 99 KiB.
    assert cut.depth * ((cut.stages - 1) * (cut.outputs * size * (1 + gated) + 2 * rows) + 2 * rows) <= 100_000


def test_a_card_is_filled_where_the_weights_are_large_enough() -> None:
    for outputs, depth in ((4096, 2048), (2048, 2048), (2048, 6144), (1024, 3072)):
        cut = tile(16, outputs, depth, 2, 132, gated=False, normed=False)
        assert -(-outputs // cut.outputs) * cut.parts >= 0.9 * 132


def test_there_is_room_for_the_parts_of_every_product() -> None:
    products = Products(132, chained=False)
    matrices = [(Matrix(torch.zeros(outputs, depth)), gated) for outputs, depth, gated in ((64, 512, False), (200, 48, True))]
    workspace = products.workspace(matrices, torch.device("cpu"))
    for matrix, gated in matrices:
        for num_rows in range(1, MOST_ROWS + 1):
            cut = products.tile(padded(num_rows), matrix, gated=gated, normed=False)
            blocks = -(-matrix.weight.shape[0] // (1 + gated) // cut.outputs)
            assert len(workspace.arrived) >= blocks
            if cut.parts > 1:
                assert len(workspace.sums) >= blocks * cut.parts * 2 * padded(num_rows) * cut.outputs
                assert len(workspace.squares) >= blocks * cut.parts * padded(num_rows)


def test_other_models_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="is a Linear, not one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        read_layers(nn.Linear(2, 2), HEADS, chained=False)


def test_matrices_have_rows_of_whole_tiles() -> None:
    assert Matrix(torch.zeros(3, 32)).supported
    assert not Matrix(torch.zeros(3, 40)).supported
    assert not Matrix(torch.zeros(32, 3).t()).supported


@pytest.mark.parametrize(("fused", "name"), [("none", "DraftModel"), ("attention", "DraftModel"), ("layers", "FusedModel")])
def test_the_class_of_a_draft_model_follows_the_configuration(fused: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for kind in ("DraftModel", "FusedModel"):
        monkeypatch.setattr(f"minedraft_core.vllm.gpu.methods.{kind}", lambda *_, kind=kind: made.append(kind))
    monkeypatch.setattr("minedraft_core.vllm.gpu.methods.single_rank_group", lambda: None)
    monkeypatch.setattr("minedraft_core.vllm.gpu.methods.draft_config", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    SeparateModel().load(nn.Identity(), None, torch.device("cuda", 0), DrafterConfig(fused=fused))  # type: ignore[arg-type]
    assert made == [name]
