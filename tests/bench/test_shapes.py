"""The shapes are configurations that transformers reads, of the sizes in their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.engine.arg_utils import AsyncEngineArgs

from minedraft_core.bench.shapes import HEAD_SHAPES, SHAPES, write_shapes
from minedraft_core.config import MineDraftConfig, PipelineConfig
from minedraft_core.vllm.args import draft_model_speculation


@pytest.mark.parametrize("name", SHAPES)
def test_the_size_is_that_of_the_name(name: str, tmp_path: Path) -> None:
    write_shapes(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    nominal = float(next(part for part in name.split("-") if part.endswith("b") and part[0].isdigit()).removesuffix("b"))
    assert billions == pytest.approx(nominal, rel=0.25)


@pytest.mark.parametrize("name", HEAD_SHAPES)
def test_vllm_takes_a_head_for_its_target(name: str, tmp_path: Path) -> None:
    write_shapes(tmp_path)
    target, _, method = name.rpartition("-")
    speculative = MineDraftConfig(method=method, model=str(tmp_path / name), num_speculative_tokens=4)
    config = AsyncEngineArgs(
        model=str(tmp_path / target),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=2048,
        speculative_config=draft_model_speculation(PipelineConfig(speculative=speculative)),
    ).create_engine_config()
    head = config.speculative_config.draft_model_config
    assert head.architectures == [{"eagle": "EagleLlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}[method]]
    assert head.get_vocab_size() == config.model_config.get_vocab_size()
    assert head.get_hidden_size() == config.model_config.get_hidden_size()
    assert head.hf_config.num_hidden_layers == 1
