"""The shapes are configurations that transformers reads, of the sizes in their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minedraft_core.bench.shapes import SHAPES, write_shapes


@pytest.mark.parametrize("name", SHAPES)
def test_the_size_is_that_of_the_name(name: str, tmp_path: Path) -> None:
    write_shapes(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    nominal = float(next(part for part in name.split("-") if part.endswith("b") and part[0].isdigit()).removesuffix("b"))
    assert billions == pytest.approx(nominal, rel=0.25)
