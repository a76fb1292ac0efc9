"""Inputs of the draft kernels, and the comparison of a kernel with its reference on a device."""

from __future__ import annotations

import torch

from minedraft_core.vllm.gpu import kernels

SLOTS, BLOCK, MAX_LEN, COLUMNS, VOCAB = 9, 16, 100, 7, 1000


def _integers(generator: torch.Generator, low: int, high: int, *size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(low, high, size, generator=generator, dtype=dtype)


def compare(device: str, seed: int) -> None:
    """Every kernel against its reference, on random batches with rows that sampled nothing and contexts past the drafter's."""
    generator = torch.Generator().manual_seed(seed)
    num_reqs, bucket = 5, 8
    lengths = _integers(generator, 1, 6, num_reqs, dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
    batch = {
        "idx_mapping": torch.randperm(SLOTS, generator=generator)[:num_reqs],
        "query_start_loc": starts,
        "input_ids": _integers(generator, 0, VOCAB, int(starts[-1]), dtype=torch.int32),
        "num_sampled": _integers(generator, 0, 3, num_reqs, dtype=torch.int32),
        "num_rejected": (torch.rand(num_reqs, generator=generator) * lengths).to(torch.int32),
        "last_sampled": _integers(generator, 0, VOCAB, SLOTS, 1, dtype=torch.int64),
        "num_computed": _integers(generator, 1, 110, SLOTS, dtype=torch.int32),
        "temperature": torch.rand(SLOTS, generator=generator),
        "seeds": _integers(generator, -(1 << 62), 1 << 62, SLOTS, dtype=torch.int64),
        "table": _integers(generator, 1, 50, SLOTS, COLUMNS, dtype=torch.int32),
    }
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    packs = [torch.full((bucket, kernels.row_width(COLUMNS)), 7, dtype=torch.int32, device=device) for _ in range(2)]
    kernels.pack(packs[0], num_reqs, **batch)
    kernels.pack_reference(packs[1], num_reqs, **batch)
    used = [*range(5), *range(6, kernels.HEADER + COLUMNS)]
    torch.testing.assert_close(packs[0][:, used], packs[1][:, used], rtol=0, atol=0)

    def empty(rows: int) -> dict[str, torch.Tensor]:
        return {
            "ids": torch.zeros(rows, dtype=torch.int32, device=device),
            "positions": torch.zeros(rows, dtype=torch.int64, device=device),
            "slots": torch.zeros(rows, dtype=torch.int64, device=device),
            "seq_lens": torch.zeros(bucket, dtype=torch.int32, device=device),
        }

    first = [
        empty(2 * bucket)
        | {"temperature": torch.zeros(bucket, device=device), "seeds": torch.zeros(bucket, dtype=torch.int64, device=device)}
        for _ in range(2)
    ]
    kernels.first_inputs(packs[1], **first[0], vocab_size=VOCAB - 100, block_size=BLOCK, max_len=MAX_LEN)
    kernels.first_inputs_reference(packs[1], **first[1], vocab_size=VOCAB - 100, block_size=BLOCK, max_len=MAX_LEN)
    assert int(first[1]["ids"].max()) < VOCAB - 100
    torch.testing.assert_close(first[0], first[1], rtol=0, atol=0)

    drafts = _integers(generator, -1, VOCAB + 1, bucket, 4, dtype=torch.int64).to(device)
    for step in (1, 2, 3):
        following = [empty(bucket) for _ in range(2)]
        for function, outputs in ((kernels.next_inputs, following[0]), (kernels.next_inputs_reference, following[1])):
            function(packs[1], drafts, step, **outputs, vocab_size=VOCAB, block_size=BLOCK, max_len=MAX_LEN)
        torch.testing.assert_close(following[0], following[1], rtol=0, atol=0)
