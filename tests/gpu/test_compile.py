"""The kernels of drafting ahead compile for a GPU, without one: Triton brings its compilers along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minedraft_core.vllm.gpu import chain_kernels, word_kernels

HOPPER = GPUTarget("cuda", 90, 32)
LONG = ("chains", "tallies", "pack_long", "positions", "slots", "columns", "seeds", "words", "tokens", "idx_mapping")
FLOAT = ("pack_float", "temperature")
NUMBERS = ("stride", "out_stride", "kept_stride", "vocab_size", "tally", "num_rows", "number", "count", "patience")
CASES: list[tuple[Any, dict[str, int]]] = [
    (chain_kernels._mark_kernel, {}),
    (chain_kernels._settle_kernel, {"DRAFTS": 4, "RING": 10, "BLOCK": 256}),
    (chain_kernels._inputs_kernel, {"DRAFTS": 4, "RING": 10, "WIDTH": 1, "BLOCK_SIZE": 16, "MAX_LEN": 2048}),
    (chain_kernels._inputs_kernel, {"DRAFTS": 3, "RING": 8, "WIDTH": 2, "BLOCK_SIZE": 16, "MAX_LEN": 2048}),
    (chain_kernels._extend_kernel, {"RING": 10}),
    (word_kernels._publish_kernel, {"DRAFTS": 3, "RING": 8, "BLOCK": 4}),
    (word_kernels._gather_kernel, {"DRAFTS": 4, "RING": 10, "BLOCK": 1024}),
    (word_kernels._take_kernel, {"BLOCK": 1024}),
    (word_kernels._certain_kernel, {"DRAFTS": 4, "BLOCK": 1024}),
]


def kind(name: str) -> str:
    if name in NUMBERS:
        return "i32"
    if name in ("logits", "out", "kept"):
        return "*bf16"
    return "*i64" if name in LONG else "*fp32" if name in FLOAT else "*i32"


@pytest.mark.parametrize(("kernel", "constants"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_compiles(kernel: Any, constants: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind(name) for name in names}
    if kernel is chain_kernels._mark_kernel:
        signature["out"] = "*i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    assert compile_kernel(source, target=HOPPER).asm["cubin"]


def test_the_wait_looks_again_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that the compiler moved out of the loop would wait for ever."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    kernel = word_kernels._take_kernel
    signature = {name: "constexpr" if name == "BLOCK" else kind(name) for name in kernel.arg_names}
    ptx = compile_kernel(ASTSource(fn=kernel, signature=signature, constexprs={(kernel.arg_names.index("BLOCK"),): 8}), target=HOPPER).asm[
        "ptx"
    ]
    before, loop = ptx.split("bra", 1)
    assert before.count("ld.volatile.global.b64") == 1
    assert loop.split("bra", 1)[0].count("ld.volatile.global.b64") == 1
