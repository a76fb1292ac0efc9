"""A scheduler without a model: vLLM's asynchronous scheduler with the cadence, and outputs that a rule writes. Runs on CPU."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from minedraft_core.config import DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.types import Record
from minedraft_core.vllm.args import draft_model_speculation
from minedraft_core.vllm.gpu.output import TimedOutput
from minedraft_core.vllm.gpu.scheduler import MineDraftAsyncScheduler

BLOCK = 32
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class Records:
    """A feed that keeps what is pushed."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def push(self, records: Any) -> None:
        self.records.extend(records)

    def close(self) -> None:
        pass


def write_model(folder: Path, length: int) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPE, "max_position_embeddings": length}))
    return str(folder)


def scheduler(
    tmp_path: Path,
    mode: str,
    *,
    k: int = 4,
    draft_length: int = 512,
    num_blocks: int = 200,
    keys: dict[str, Any] | None = None,
    drafter: dict[str, Any] | None = None,
    **args: Any,
) -> MineDraftAsyncScheduler:
    """The scheduler as vLLM's engine builds it, over a KV cache that is only counted. `keys` and `drafter` are further ones."""
    target, draft = write_model(tmp_path / "target", 512), write_model(tmp_path / "draft", draft_length)
    speculative = MineDraftConfig()
    if mode != "off":
        speculative = MineDraftConfig(
            model=draft,
            num_speculative_tokens=k,
            is_parallel=mode in ("parallel", "pearl"),
            force_pearl=mode == "pearl",
            **(keys or {}),
        )
    config = PipelineConfig(speculative=speculative, drafter=DrafterConfig(device=0, **(drafter or {})))
    values = {
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
        "max_model_len": 256,
        "block_size": BLOCK,
        "max_num_batched_tokens": 256,
        **args,
    }
    vllm_config = AsyncEngineArgs(
        model=target,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 20,
        # A CPU has no CUDA graphs, which vLLM wants where it trims batches.
        speculative_config=None if mode == "off" else {**draft_model_speculation(config), "enable_adaptive_verification": False},
        additional_config={"minedraft": config.model_dump(mode="json")},
        **values,
    ).create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    init_none_hash(hash)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    made = MineDraftAsyncScheduler(
        vllm_config=vllm_config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )
    made._feed = Records()
    return made


def request(name: str, prompt: int = 10, tokens: int = 20, **params: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **params)
    return Request(request_id=name, prompt_token_ids=list(range(3, 3 + prompt)), sampling_params=sampling, pooling_params=None)


def deliver(scheduler: MineDraftAsyncScheduler, output: SchedulerOutput, accept: Callable[[str, int], int], **extra: Any) -> TimedOutput:
    """What a worker would return: `accept(request, drafted)` drafts and one more for requests past their prompts."""
    names = list(output.num_scheduled_tokens)
    tokens = []
    for name in names:
        running = scheduler.requests.get(name)
        done = running is None or not running.is_prefill_chunk
        drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
        tokens.append([7] * (1 + (accept(name, drafted) if drafted else 0)) if done else [])
    return TimedOutput(req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=tokens, **extra)


class Loop:
    """vLLM's engine loop with up to two passes in flight. `passes` holds what each pass was scheduled for, in order."""

    def __init__(self, scheduler: MineDraftAsyncScheduler, accept: Callable[[str, int], int] = lambda _name, _drafted: 2) -> None:
        self.scheduler, self._accept = scheduler, accept
        self._queue: deque[tuple[SchedulerOutput, TimedOutput]] = deque()
        self.passes: list[SchedulerOutput] = []
        self.tokens: dict[str, int] = {}
        self.extra: dict[str, Any] = {}

    def run(self, passes: int) -> None:
        for _ in range(passes):
            if self.scheduler.has_requests():
                output = self.scheduler.schedule()
                self._queue.append((output, deliver(self.scheduler, output, self._accept, **self.extra)))
                self.extra = {}
                if output.total_num_scheduled_tokens:
                    self.passes.append(output)
                if len(self._queue) < 2:
                    continue
            if not self._queue:
                return
            scheduled, delivered = self._queue.popleft()
            for group in self.scheduler.update_from_output(scheduled, delivered).values():
                for entry in group.outputs:
                    self.tokens[entry.request_id] = self.tokens.get(entry.request_id, 0) + len(entry.new_token_ids)
