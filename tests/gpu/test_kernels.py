"""The draft kernels against their references: by Triton's interpreter on any machine, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minedraft_core.vllm.gpu.kernels import HEADER, buckets, row_width
from tests.gpu.chain_cases import compare_chained
from tests.gpu.decode_cases import LONG, compare_decode, compile_decode
from tests.gpu.eagle_cases import compare_eagle, compile_eagle
from tests.gpu.kernel_cases import compare, compare_chains
from tests.gpu.product_cases import LARGE, compare_products, compile_products

_INTERPRETED = "from tests.gpu.kernel_cases import compare\nfor seed in range(10): compare('cpu', seed)"
_CHAINS = "from tests.gpu.kernel_cases import compare_chains\nfor seed in range(10): compare_chains('cpu', seed)"
_DECODE = """
import torch
from tests.gpu.decode_cases import SHORT, compare_decode
for seed in range(2): compare_decode('cpu', torch.float32, seed, SHORT, 1e-4)
"""

_PRODUCTS = """
import torch
from tests.gpu.product_cases import SMALL, compare_products
compare_products('cpu', torch.float32, SMALL, 1e-4)
"""
_ORDERED = """
import torch
from minedraft_core.vllm.gpu.decode import Heads
from tests.gpu.chain_cases import random_layers, step_of
heads = Heads(4, 2, 32, 4)
layers = random_layers('cpu', torch.float32, 2, 64, heads, 3, eight=True)
run, start = step_of(layers, heads, 3, 2)
first, second = run(layers, start.clone()), run(layers, start.clone())
assert torch.equal(first, second) and first.isfinite().all() and not torch.equal(first, start)
"""
_EAGLE = "from tests.gpu.eagle_cases import compare_eagle\nfor seed in range(10): compare_eagle('cpu', seed)"


@pytest.mark.parametrize(
    "command",
    [
        ["-c", _INTERPRETED],
        ["-c", _CHAINS],
        ["-c", _DECODE],
        ["-c", _PRODUCTS],
        ["-c", _ORDERED],
        ["-c", _EAGLE],
        ["-m", "tests.gpu.layer_numbers"],
        ["-m", "tests.gpu.fused_numbers"],
        ["-m", "tests.gpu.lives"],
        ["-m", "tests.gpu.lookahead_lives"],
        ["-m", "tests.gpu.eagle_lives"],
    ],
    ids=["references", "chains", "decode", "products", "ordered", "eagle", "layers", "fused", "lives", "lookahead", "eagle lives"],
)
def test_interpreted(command: list[str]) -> None:
    """In a process of its own, since Triton decides on import how it runs kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, *command], env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_compiled(seed: int) -> None:
    compare("cuda", seed)
    compare_chains("cuda", seed)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_compiled_eagle(seed: int) -> None:
    compare_eagle("cuda", seed)


@pytest.mark.gpu
def test_chained_layers() -> None:
    compare_chained()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))
def test_compiled_decode(seed: int) -> None:
    compare_decode("cuda", torch.bfloat16, seed, LONG, 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("chained", [False, True])
def test_compiled_products(chained: bool) -> None:
    compare_products("cuda", torch.bfloat16, LARGE, 3e-2, (132,) if chained else (8,), chained=chained)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_the_kernel_of_products_compiles_for_hopper() -> None:
    assert all(0 < size < 100_000 for size in compile_products(90))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_the_attention_kernel_compiles_for_hopper() -> None:
    assert all(0 < size < 100_000 for size in compile_decode(90))


def test_the_kernels_of_eagle_compile_for_hopper() -> None:
    assert compile_eagle(90) == 3


@pytest.mark.parametrize("columns", [1, 2, 7, 128])
def test_rows_keep_the_seed_aligned(columns: int) -> None:
    assert row_width(columns) >= HEADER + columns
    assert row_width(columns) % 4 == 0


@pytest.mark.parametrize("limit", [1, 2, 5, 256, 700])
def test_buckets_cover_every_batch(limit: int) -> None:
    sizes = buckets(limit)
    assert sizes[-1] == limit
    assert list(sizes) == sorted(set(sizes))
