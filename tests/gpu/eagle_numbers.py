"""A head's speculator, engine and model with weights on CPU, against `eagle_reference`: `python -m tests.gpu.eagle_numbers METHOD`.

Everything runs but what needs a device: streams, graphs, FlashAttention (vLLM's attention for CPUs is in its place) and compiled kernels
(their references are). The target is a Llama in transformers. A prompt in two chunks, prompts beside drafts, rejections, all drafts
accepted. Every draft has to be the reference's, in float32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.worker_base import get_current_attn_backends, get_supported_kv_cache_layouts, record_kv_cache_layout

from minedraft_core.config import DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.vllm.args import draft_model_speculation
from minedraft_core.vllm.gpu import engine as draft_engine
from minedraft_core.vllm.gpu import kernels, speculator
from minedraft_core.vllm.gpu.eagle import engine as eagle_engine
from minedraft_core.vllm.gpu.eagle import kernels as eagle_kernels
from minedraft_core.vllm.gpu.eagle import speculator as eagle_speculator
from minedraft_core.vllm.gpu.eagle.ends import target_ends
from minedraft_core.vllm.gpu.eagle.engine import EagleEngine
from minedraft_core.vllm.gpu.eagle.model import EagleModel, head_config
from minedraft_core.vllm.gpu.eagle.speculator import EagleSpeculator
from minedraft_core.vllm.gpu.engine import RING
from tests.gpu.alone import stand_alone
from tests.gpu.eagle_reference import ReferenceHead, ReferenceTarget
from tests.gpu.heads import write_head, write_target

CPU = torch.device("cpu")
K, REQUESTS, BLOCK, VOCAB = 4, 3, 32, 600
COLUMNS = 8
BLOCKS = [[1 + COLUMNS * row + column for column in range(COLUMNS)] for row in range(REQUESTS)]


class CpuModel(EagleModel):
    """A head with vLLM's attention for CPUs, loaded and run by `EagleModel`."""

    def __init__(self, config: VllmConfig, ends: Any) -> None:
        self.config, self.device, self._group = config, CPU, None
        self._priority = current_platform.get_default_ir_op_priority(config)
        self.vocab_size, self.width = config.model_config.get_vocab_size(), ends.width
        with set_current_vllm_config(config):
            self._model = self._load()
            self._check()
            self._complete(ends)

    def bind_cache(self, num_blocks: int, block_size: int, max_num_reqs: int) -> None:
        config = self.config
        with set_current_vllm_config(config):
            specs = attn_utils.get_kv_cache_spec(config)
            layouts = [[layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(config))]]
            record_kv_cache_layout(config.cache_config, resolve_kv_cache_layout(config, layouts, list(specs.values())).name)
            page = sum(spec.page_size_bytes for spec in specs.values())
            self._cache = get_kv_cache_configs(config, [specs], [num_blocks * page])[0]
            self._groups, _, sizes = attn_utils.init_attn_backend(self._cache, config, CPU)
            assert sizes == [block_size]
            layers = config.compilation_config.static_forward_context
            members = [group for groups in self._groups for group in groups]
            attn_utils.init_kv_cache(layers, self._cache, CPU, sizes, config, attn_groups=members)

    def _run(self, inputs: Any, slots: Any, query_start_loc: Any, seq_lens: Any, table: Any, *lengths: int, planned: bool) -> Any:
        metadata = attn_utils.build_attn_metadata(
            self._groups,
            len(seq_lens),
            len(slots),
            query_start_loc,
            query_start_loc,
            lengths[0],
            seq_lens,
            int(seq_lens.max()),
            [table.contiguous()],
            slots[None],
            self._cache,
            seq_lens_cpu_upper_bound=seq_lens,
        )
        by_layer = attn_utils.build_slot_mappings_by_layer(slots[None], self._cache)
        with (
            set_current_vllm_config(self.config),
            set_forward_context(metadata, self.config, num_tokens=len(slots), slot_mapping=by_layer),
        ):
            return self._model(**inputs)


class CpuEngine(EagleEngine):
    """Jobs run when they are started."""

    def __init__(self, model: CpuModel) -> None:
        self._model, self._target, self._device = model, CPU, CPU
        self._logits, self._scored = None, False
        self._ready = [None] * RING

    def start(self, job: Any, prompt: Any, *, drafts: int) -> None:
        self._fetch(job.slot, REQUESTS)
        if prompt is not None:
            self._run_prompt(prompt, job.num_reqs)
        if drafts:
            for step in range(drafts):
                self._step(step, REQUESTS, sampled=False)
            self._landing[job.slot].copy_(self._drafts)

    def bucket(self, num_reqs: int) -> int:
        return REQUESTS

    def settle(self) -> None:
        pass

    def land(self, job: Any) -> torch.Tensor:
        return self._landing[job.slot, : job.num_reqs]


class World:
    """The requests, and what vLLM's runner knows of them."""

    def __init__(self, proposer: EagleSpeculator, target: ReferenceTarget, head: ReferenceHead, method: str) -> None:
        self._proposer, self._target, self._head, self._method = proposer, target, head, method
        self.states = SimpleNamespace(
            max_num_reqs=REQUESTS,
            draft_tokens=torch.zeros(REQUESTS, K, dtype=torch.int64),
            num_computed_tokens=SimpleNamespace(gpu=torch.zeros(REQUESTS, dtype=torch.int32)),
        )
        self.tables = SimpleNamespace(input_block_tables=[torch.zeros(REQUESTS, COLUMNS, dtype=torch.int32)], block_sizes=[BLOCK])
        self.texts: dict[int, list[int]] = {}
        self.accepted: list[int] = []
        self._last = torch.zeros(REQUESTS, 1, dtype=torch.int64)
        self._next = torch.zeros(1, REQUESTS, dtype=torch.int32)

    def step(self, **scheduled: tuple[int, int]) -> None:
        """One pass; r0=(tokens of the prompt or 1, drafts). Checks the drafts it leaves."""
        slots = [int(name[1:]) for name in scheduled]
        own, drafted = zip(*scheduled.values(), strict=True)
        self._proposer.land([name for name, (_, drafts) in scheduled.items() if drafts])
        computed = self.states.num_computed_tokens.gpu
        before = [int(computed[slot]) for slot in slots]
        ids, sources, sampled, rejected = [], [], [], []
        for slot, count, drafts, start in zip(slots, own, drafted, before, strict=True):
            text = self.texts[slot]
            run = text[start : start + count] + self.states.draft_tokens[slot, :drafts].tolist()
            seen = self._target.run(text[:start] + run)
            ids += run
            sources.append([source[start:] for source in seen.sources(self._method)])
            got = [] if start + count < len(text) else self._verify(seen.following[start + count - 1 :].tolist(), run[count:])
            sampled.append(len(got))
            rejected.append(drafts + 1 - len(got) if got else 0)
            self.accepted += [len(got) - 1] * (drafts > 0)
            self.texts[slot] = text + got
            computed[slot] = start + len(run) - rejected[-1]
            self._last[slot], self._next[0, slot] = self.texts[slot][-1], [*text, 0][start + count]
        self._propose(
            list(scheduled), slots, [count + drafts for count, drafts in scheduled.values()], before, ids, sources, sampled, rejected
        )
        for slot, count in zip(slots, sampled, strict=True):
            if count:
                self._compare(slot, next(number for number, other in enumerate(slots) if other == slot))

    @staticmethod
    def _verify(following: list[int], drafts: list[int]) -> list[int]:
        got = [following[0]]
        for draft, token in zip(drafts, following[1:], strict=True):
            if draft != got[-1]:
                break
            got.append(token)
        return got

    def _compare(self, slot: int, row: int) -> None:
        text = self.texts[slot]
        seen = self._target.run(text[:-1])
        wanted = self._head.drafts(text, seen.sources(self._method), K)
        found = self._proposer._engine._drafts[row].tolist()
        assert found == wanted, f"request {slot} after {len(text)} tokens: {found}, and not {wanted}"

    def _propose(
        self,
        names: list[str],
        slots: list[int],
        lengths: list[int],
        before: list[int],
        ids: list[int],
        sources: Any,
        sampled: Any,
        rejected: Any,
    ) -> None:
        count, starts = len(slots), np.cumsum([0, *lengths])
        positions = torch.cat([torch.arange(start, start + length) for start, length in zip(before, lengths, strict=True)])
        table = torch.tensor([BLOCKS[slot] for slot in slots], dtype=torch.int32)
        self.tables.input_block_tables[0][:count] = table
        owners = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
        prompts = [length > K + 1 or not drafts for length, drafts in zip(lengths, [length - 1 for length in lengths], strict=True)]
        batch = SimpleNamespace(
            num_reqs=count,
            req_ids=names,
            idx_mapping=torch.tensor(slots),
            idx_mapping_np=np.array(slots),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            input_ids=torch.tensor([*ids, 7, 7], dtype=torch.int32),
            positions=positions,
            seq_lens=torch.tensor([start + length for start, length in zip(before, lengths, strict=True)], dtype=torch.int32),
            num_tokens=len(ids),
            num_scheduled_tokens=np.array(lengths),
            num_computed_tokens_np=np.array(before),
            prefill_len_np=np.array([0 if done else 1 << 20 for done in sampled]),
            has_prefill=any(prompts),
            seq_lens_cpu_upper_bound=torch.tensor([start + length for start, length in zip(before, lengths, strict=True)]),
        )
        mapping = table[owners, positions // BLOCK].long() * BLOCK + positions % BLOCK
        parts = [torch.cat(part) for part in zip(*sources, strict=True)]
        padding = torch.full((2, parts[0].shape[1]), 9.0)
        parts = [torch.cat([part, padding]) for part in parts]
        self._proposer.propose(
            batch,
            {},
            {"layer": mapping},
            parts[-1],
            parts if self._method == "eagle3" else None,
            torch.tensor(sampled, dtype=torch.int32),
            torch.tensor(rejected, dtype=torch.int32),
            self._last,
            self._next,
            torch.zeros(REQUESTS),
            torch.zeros(REQUESTS, dtype=torch.int64),
        )


@contextmanager
def on_cpu() -> Iterator[None]:
    """References in the place of kernels, and no device to choose."""
    with (
        patch.object(torch.cuda, "device", lambda _device: nullcontext()),
        patch.object(speculator, "pack", kernels.pack_reference),
        patch.object(eagle_speculator, "carry", eagle_kernels.carry_reference),
        patch.object(eagle_engine, "first_rows", eagle_kernels.first_rows_reference),
        patch.object(draft_engine, "next_inputs", kernels.next_inputs_reference),
    ):
        yield


def build(folder: Path, method: str) -> World:
    target, head = folder / "target", folder / "head"
    write_target(target, VOCAB, torch.float32)
    write_head(head, target, method, torch.float32)
    pipeline = PipelineConfig(
        speculative=MineDraftConfig(method=method, model=str(head), num_speculative_tokens=K), drafter=DrafterConfig(device=0)
    )
    config = AsyncEngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=256,
        max_num_seqs=REQUESTS,
        kv_cache_memory_bytes=1 << 20,
        speculative_config={**draft_model_speculation(pipeline), "draft_sample_method": "greedy"},
    ).create_engine_config()
    _set_torch_accelerator_to_noop()
    stand_alone(config, folder)
    with set_current_vllm_config(config):
        ends = target_ends(get_model(vllm_config=config), config, CPU)
    assert ends is not None
    own = head_config(config, CPU, DrafterConfig())
    # FlashAttention is for GPUs.
    own.attention_config.backend = None
    model = CpuModel(own, ends)
    proposer = EagleSpeculator(config, CPU, SimpleNamespace(world_size=1))
    world = World(proposer, ReferenceTarget(target), ReferenceHead(head, target, method), method)
    proposer.connect(CpuEngine(model), world.states, SimpleNamespace(temperature=SimpleNamespace(np=np.zeros(REQUESTS))))
    proposer.bind(world.tables, 0, "layer", 1 + REQUESTS * COLUMNS, 256)
    proposer._buffer = torch.zeros(REQUESTS, K, dtype=torch.int64)
    proposer._ready = True
    return world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=["eagle", "eagle3"])
    method = parser.parse_args().method
    with tempfile.TemporaryDirectory() as folder, on_cpu():
        world = build(Path(folder), method)
        for slot, length in enumerate((40, 7, 2)):
            world.texts[slot] = [(100 + 37 * slot + 11 * at) % VOCAB for at in range(length)]
        world.step(r0=(33, 0), r1=(7, 0))
        world.step(r0=(7, 0), r1=(1, K))
        world.step(r2=(2, 0), r0=(1, K), r1=(1, K))
        for _ in range(6):
            world.step(r0=(1, K), r2=(1, K))
            world.step(r1=(1, K))
        world.step(r1=(1, 0), r0=(1, 2), r2=(1, K))
        world.step(r2=(1, K), r1=(1, K), r0=(1, K))
        sys.stdout.write(f"accepted {world.accepted}\n")
        assert {0, 1, 2} <= set(world.accepted)


if __name__ == "__main__":
    main()
