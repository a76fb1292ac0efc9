"""The kernels of EAGLE jobs against their references, on a device."""

from __future__ import annotations

import torch

from minedraft_core.vllm.gpu import kernels
from minedraft_core.vllm.gpu.eagle import kernels as eagle

SLOTS, BLOCK, MAX_LEN, COLUMNS, VOCAB = 9, 16, 100, 7, 1000


def _integers(generator: torch.Generator, low: int, high: int, *size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, size, generator=generator, dtype=dtype)


def compare_eagle(device: str, seed: int) -> None:
    """Requests with fewer rows than travel and with more, that sampled nothing, that are at the drafter's end; one and three sources."""
    generator = torch.Generator().manual_seed(seed)
    num_reqs, bucket, length = 6, 8, 2 + seed % 5
    lengths = _integers(generator, 1, 2 * length, num_reqs)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
    tokens = int(starts[-1])
    batch = {
        "idx_mapping": torch.randperm(SLOTS, generator=generator)[:num_reqs],
        "query_start_loc": starts,
        "input_ids": _integers(generator, 0, VOCAB, tokens + 3),
        "num_sampled": _integers(generator, 0, 3, num_reqs),
        "num_rejected": (torch.rand(num_reqs, generator=generator) * lengths).to(torch.int32),
        "last_sampled": _integers(generator, 0, VOCAB, SLOTS, 1, dtype=torch.int64),
        "num_computed": _integers(generator, 1, 110, SLOTS),
    }
    verified = kernels.Verified(num_reqs, **{name: tensor.to(device) for name, tensor in batch.items()})
    column = kernels.HEADER + COLUMNS
    packed = _integers(generator, 1, 50, bucket, kernels.row_width(COLUMNS + length)).to(device)
    for parts in (1, 3):
        sources = [torch.randn(tokens + 3, 1030, generator=generator).to(device, torch.bfloat16) for _ in range(parts)]
        ran = []
        for function in (eagle.carry, eagle.carry_reference):
            rows = packed.clone()
            hidden = torch.full((bucket, length, 1030 * parts), 7.0, dtype=torch.bfloat16, device=device)
            function(rows, column, hidden, sources, verified)
            ran.append((rows, hidden))
        torch.testing.assert_close(ran[0], ran[1], rtol=0, atol=0)
    rows = ran[1][0]
    outputs = []
    for function in (eagle.first_rows, eagle.first_rows_reference):
        found = {
            "ids": torch.zeros(bucket * length, dtype=torch.int32, device=device),
            "positions": torch.zeros(bucket * length, dtype=torch.int64, device=device),
            "slots": torch.zeros(bucket * length, dtype=torch.int64, device=device),
            "seq_lens": torch.zeros(bucket, dtype=torch.int32, device=device),
            "temperature": torch.zeros(bucket, device=device),
            "seeds": torch.zeros(bucket, dtype=torch.int64, device=device),
        }
        function(rows, column, length, **found, vocab_size=VOCAB - 100, block_size=BLOCK, max_len=MAX_LEN)
        found["temperature"] = found["temperature"].view(torch.int32)
        outputs.append(found)
    assert int(outputs[1]["ids"].max()) < VOCAB - 100
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


def compile_eagle(capability: int) -> int:
    """Compile the kernels for a GPU that need not be here; how many there are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    halves, longs, singles = (
        {"hidden", "source"},
        {"idx_mapping", "last_sampled", "positions", "slots", "seeds", "pack_long"},
        {"pack_float", "temperature"},
    )
    constants = {"LENGTH": 5, "PADDED": 8, "BLOCK": 1024, "BLOCK_SIZE": 16, "MAX_LEN": 2048}
    numbers = {"stride", "column", "num_reqs", "hidden_stride", "first", "source_stride", "width", "rows_stride", "vocab_size"}
    launched = (eagle._shift_kernel, eagle._carry_kernel, eagle._first_rows_kernel)
    for kernel in launched:
        signature = {}
        for name in kernel.arg_names:
            kind = "*bf16" if name in halves else "*i64" if name in longs else "*fp32" if name in singles else "*i32"
            signature[name] = "constexpr" if name in constants else "i32" if name in numbers else kind
        mine = {(kernel.arg_names.index(name),): value for name, value in constants.items() if name in kernel.arg_names}
        triton.compile(ASTSource(kernel, signature, mine), target=GPUTarget("cuda", capability, 32))
    return len(launched)
