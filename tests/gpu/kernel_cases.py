"""Inputs of the draft kernels, and the comparison of a kernel with its reference on a device."""

from __future__ import annotations

import torch

from minedraft_core.vllm.gpu import chain_kernels, kernels, word_kernels

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
    }
    others = {
        "temperature": torch.rand(SLOTS, generator=generator),
        "seeds": _integers(generator, -(1 << 62), 1 << 62, SLOTS, dtype=torch.int64),
        "table": _integers(generator, 1, 50, SLOTS, COLUMNS, dtype=torch.int32),
    }
    verified = kernels.Verified(num_reqs, **{name: tensor.to(device) for name, tensor in batch.items()})
    others = {name: tensor.to(device) for name, tensor in others.items()}
    packs = [torch.full((bucket, kernels.row_width(COLUMNS)), 7, dtype=torch.int32, device=device) for _ in range(2)]
    kernels.pack(packs[0], verified, **others)
    kernels.pack_reference(packs[1], verified, **others)
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


def compare_chains(device: str, seed: int) -> None:
    """Every kernel of drafting ahead against its reference, over some passes with marks of all kinds, hits, misses, and idle rows."""
    generator = torch.Generator().manual_seed(seed)
    drafts, rows, small = 3, 6, 4
    ring = chain_kernels.ring_length(drafts)

    def state() -> dict[str, torch.Tensor]:
        chosen = torch.Generator().manual_seed(seed)
        return {
            "chains": _integers(chosen, 0, small, SLOTS, ring, dtype=torch.int64).to(device),
            "last": _integers(chosen, 0, 30, SLOTS, dtype=torch.int32).to(device),
            "base": _integers(chosen, 0, 25, SLOTS, dtype=torch.int32).to(device),
            "temperature": torch.zeros(SLOTS, device=device),
            "seeds": torch.zeros(SLOTS, dtype=torch.int64, device=device),
            "row_slots": torch.zeros(SLOTS, dtype=torch.int32, device=device),
            "row_bases": torch.zeros(SLOTS, dtype=torch.int32, device=device),
        }

    ours, reference = state(), state()
    tallies = [torch.full((3, chain_kernels.TALLIES), 9, dtype=torch.int64, device=device) for _ in range(2)]
    packed = _integers(generator, 0, small, rows, kernels.row_width(COLUMNS), dtype=torch.int32)
    packed[:, 2] = _integers(generator, 1, 30, rows, dtype=torch.int32)
    packed[:, 3] = _integers(generator, 0, 2, rows, dtype=torch.int32)
    idx = torch.randperm(SLOTS, generator=generator)[:rows]
    rejected, computed, prefill = (_integers(generator, 0, high, SLOTS, dtype=torch.int32) for high in (2, 9, 5))
    packs = [packed.to(device), packed.to(device)]
    for function, out in ((chain_kernels.mark, packs[0]), (chain_kernels.mark_reference, packs[1])):
        function(out, idx.to(device), rejected.to(device), computed.to(device), prefill.to(device))
    torch.testing.assert_close(packs[0], packs[1], rtol=0, atol=0)

    for function, chosen, counts in ((chain_kernels.settle, ours, tallies[0]), (chain_kernels.settle_reference, reference, tallies[1])):
        function(packs[1], **chosen, tallies=counts, tally=1, num_drafts=drafts)
    torch.testing.assert_close(tallies[0][:, :3], tallies[1][:, :3], rtol=0, atol=0)
    torch.testing.assert_close({**ours, "row_slots": ours["row_slots"][:rows]}, {**reference, "row_slots": reference["row_slots"][:rows]})

    names = ("chains", "last", "row_slots", "row_bases")
    for width in (2, 1, 1):
        outputs = [
            {
                "ids": torch.zeros(width * rows, dtype=torch.int32, device=device),
                "positions": torch.zeros(width * rows, dtype=torch.int64, device=device),
                "slots": torch.zeros(width * rows, dtype=torch.int64, device=device),
                "seq_lens": torch.zeros(rows, dtype=torch.int32, device=device),
                "draw_slots": torch.zeros(SLOTS, dtype=torch.int32, device=device),
                "columns": torch.zeros(SLOTS, dtype=torch.int64, device=device),
            }
            for _ in range(2)
        ]
        for function, chosen, out in (
            (chain_kernels.chain_inputs, ours, outputs[0]),
            (chain_kernels.chain_inputs_reference, reference, outputs[1]),
        ):
            function(
                packs[1],
                **{name: chosen[name] for name in names},
                **out,
                vocab_size=small - 1,
                num_drafts=drafts,
                width=width,
                block_size=BLOCK,
                max_len=24,
            )
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
        tokens = _integers(generator, 0, small, rows, dtype=torch.int64).to(device)
        chain_kernels.extend(ours["chains"], ours["last"], outputs[0]["draw_slots"], tokens)
        chain_kernels.extend_reference(reference["chains"], reference["last"], outputs[1]["draw_slots"], tokens)
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)
        _compare_words(device, ours, drafts, rows)


def _compare_words(device: str, state: dict[str, torch.Tensor], drafts: int, rows: int) -> None:
    names, ring = ("last", "row_slots", "row_bases"), state["chains"].shape[1]
    chosen = {name: state[name] for name in names}
    words = [torch.full((rows, drafts), 5, dtype=torch.int64, device=device) for _ in range(2)]
    word_kernels.publish(words[0], state["chains"], **chosen, number=7)
    word_kernels.publish_reference(words[1], state["chains"], **chosen, number=7)
    torch.testing.assert_close(words[0], words[1], rtol=0, atol=0)

    kept = torch.arange(SLOTS * ring * 1100, dtype=torch.float32, device=device).reshape(SLOTS, ring, 1100)
    gathered = [torch.zeros(rows, drafts, 1100, device=device) for _ in range(2)]
    word_kernels.gather_logits(gathered[0], kept, **chosen)
    word_kernels.gather_logits_reference(gathered[1], kept, **chosen)
    torch.testing.assert_close(gathered[0], gathered[1], rtol=0, atol=0)

    whole = torch.nn.functional.pad(words[1], (0, 0, 0, 2))
    complete = torch.where(whole == 0, 8 << 32, whole)
    for arriving in (whole, complete):
        tokens = [torch.full((rows, drafts), 3, dtype=torch.int64, device=device) for _ in range(2)]
        late = [torch.full((1,), 3, dtype=torch.int32, device=device) for _ in range(2)]
        word_kernels.take(arriving, tokens[0], late[0], 7, 4)
        word_kernels.take_reference(arriving, tokens[1], late[1], 7)
        torch.testing.assert_close([tokens[0], late[0]], [tokens[1], late[1]], rtol=0, atol=0)
        logits = [torch.zeros(SLOTS, drafts, 1100, device=device) for _ in range(2)]
        idx = torch.tensor([4, 1], device=device)
        word_kernels.certain_where_late(logits[0], idx, late[0])
        word_kernels.certain_where_late_reference(logits[1], idx, late[1])
        torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)
