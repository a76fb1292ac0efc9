"""The draft model: vLLM's own model code, loaded onto the drafter's device beside a target in the same process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import CompilationMode, CUDAGraphMode, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group, get_world_group, init_model_parallel_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from minedraft_core.config import ConfigError, DrafterConfig
from minedraft_core.vllm.additional import AdditionalConfig
from minedraft_core.vllm.gpu.attention import NAME, DraftAttention
from minedraft_core.vllm.gpu.decode import MAX_QUERIES, DraftStep, Heads
from minedraft_core.vllm.gpu.layout import Reserve
from minedraft_core.vllm.gpu.weights import EightBits

# FlashAttention 3 takes a plan made beforehand.
_PLANNING_VERSION = 3
_NO_WINDOW = (-1, -1)


def draft_config(config: VllmConfig, device: torch.device, drafter: DrafterConfig) -> VllmConfig:
    """The target's configuration for the draft model.

    A shallow copy, since vLLM's `replace` validates and adjusts everything again. An empty `static_forward_context` keeps the draft
    layers out of the target's KV cache. Uncompiled, the drafter needs vLLM's fused operators, which a compiled target switches off.
    """
    speculative = config.speculative_config
    assert speculative is not None
    draft = copy.copy(config)
    draft.model_config = speculative.draft_model_config
    draft.quant_config = VllmConfig.get_quantization_config(draft.model_config, config.load_config)
    if drafter.weights == "fp8":
        if draft.quant_config is not None:
            raise ConfigError(f"--drafter-weights fp8: {draft.model_config.model} is quantized already; remove the flag")
        draft.quant_config = EightBits()
    draft.cache_config = copy.copy(config.cache_config)
    draft.cache_config.cache_dtype = "auto"
    draft.cache_config.sliding_window = _only_window(draft.model_config)
    draft.attention_config = copy.copy(config.attention_config)
    draft.attention_config.backend = AttentionBackendEnum[NAME if drafter.fused in ("attention", "layers") else "FLASH_ATTN"]
    draft.attention_config.backend_per_kind = {}
    draft.parallel_config = copy.copy(config.parallel_config)
    draft.parallel_config.tensor_parallel_size = 1
    draft.lora_config = None
    compilation = draft.compilation_config = copy.copy(config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops = Counter()
    compilation.disabled_custom_ops = Counter()
    compilation.traced_files = set()
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    # Compiled code is kept on disk and names its device and products, which vLLM's key of it leaves out.
    own = {"minedraft_drafter_device": device.index, "minedraft_drafter_weights": drafter.weights}
    draft.additional_config = AdditionalConfig({**config.additional_config, **own})
    if not drafter.compiled:
        compilation.mode = CompilationMode.NONE
        compilation.custom_ops = ["all"]
    return draft


def _only_window(model: ModelConfig) -> int | None:
    # vLLM's cache configuration has the target's window, and only one that all layers have.
    kinds = getattr(model.hf_text_config, "layer_types", None)
    window: int | None = model.get_sliding_window()
    return window if kinds is None or all(kind == "sliding_attention" for kind in kinds) else None


def single_rank_group() -> GroupCoordinator | None:
    """A tensor-parallel group of this process alone, None where the target's is one already. Every rank has to call it."""
    group = get_tp_group()
    if group.world_size == 1:
        return None
    backend = torch.distributed.get_backend(group.device_group)
    ranks = [[rank] for rank in range(torch.distributed.get_world_size())]
    return init_model_parallel_group(ranks, get_world_group().local_rank, backend, use_device_communicator=False, group_name="drafter")


class DraftModel:
    """A causal LM on one device. All methods run with that device current."""

    most_fused = MAX_QUERIES
    """Query tokens of a request that the kernel of draft steps may get."""
    refusal: str | None = None
    """Why faster kernels that were tried cannot run it."""

    def __init__(self, config: VllmConfig, device: torch.device, group: GroupCoordinator | None) -> None:
        """Load the weights. `config` is that of `draft_config`. Raises ConfigError for a model that cannot be run here."""
        self.config, self.device, self._group = config, device, group
        self._priority = current_platform.get_default_ir_op_priority(config)
        with self._environment(), _own_rotary_cache(), set_current_vllm_config(config):
            self._model = self._load()
        layers = config.compilation_config.static_forward_context
        self._layers: dict[str, Attention] = {}
        for name, layer in layers.items():
            plain = isinstance(layer, Attention) and isinstance(layer.impl, FlashAttentionImpl) and layer.kv_cache_dtype == "auto"
            if not plain or layer.kv_sharing_target_layer_name is not None:
                raise ConfigError(
                    f"the draft model {self.name} has a layer {name} that the drafter cannot run on GPUs: it "
                    "needs a decoder of dense or grouped-query attention with a KV cache of its own in bfloat16 or float16"
                )
            self._layers[name] = layer
        self._heads = self._fused_heads()
        whole = all(layer.impl.sliding_window == _NO_WINDOW for layer in self._layers.values())
        planning = all(layer.impl.vllm_flash_attn_version == _PLANNING_VERSION for layer in self._layers.values())
        self._splits = config.attention_config.flash_attn_max_num_splits_for_cuda_graph if whole and planning else 0
        self.vocab_size = config.model_config.get_vocab_size()
        self.logits_dtype = config.model_config.head_dtype

    @property
    def name(self) -> str:
        """Its folder or name."""
        assert self.config.speculative_config is not None
        return str(self.config.speculative_config.draft_model_config.model)

    def describe(self) -> str:
        """One line: in what its draft steps run."""
        attention = " and fused attention" if self._heads is not None else ""
        return f"draft steps run in vLLM's kernels{attention}" + (f" ({self.refusal})" if self.refusal is not None else "")

    def _load(self) -> torch.nn.Module:
        with set_model_tag("draft_model"):
            return get_model(vllm_config=self.config, prefix="draft_model")

    def reserve(self, max_num_reqs: int, num_drafts: int, max_tokens: int) -> Reserve:
        """What jobs of so many requests and drafts and prompts of so many tokens take beside weights and KV."""
        return Reserve()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV of one token, over all layers."""
        size = torch.empty(0, dtype=self.config.model_config.dtype).element_size()
        return sum(2 * layer.num_kv_heads * layer.head_size * size for layer in self._layers.values())

    def _fused_heads(self) -> Heads | None:
        """What the kernel of draft steps needs to know, None without it. Raises ConfigError for layers it has no shape for."""
        if self.config.attention_config.backend != AttentionBackendEnum[NAME]:
            return None
        shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_size) for layer in self._layers.values()}
        plain = all(isinstance(layer.impl, DraftAttention) and layer.impl.plain for layer in self._layers.values())
        heads = Heads(*shapes.pop(), torch.cuda.get_device_properties(self.device).multi_processor_count)
        if shapes or not plain or not heads.supported:
            raise ConfigError(
                f"--drafter-fused cannot run the draft model {self.name}: it needs layers that are alike, "
                "with plain causal attention and heads of 32, 64, 128 or 256; use none"
            )
        return heads

    def bind_cache(self, num_blocks: int, block_size: int, max_num_reqs: int) -> None:
        """Allocate the KV cache; block ids are the target's."""
        self._block_size = block_size
        self._fused = None if self._heads is None else (self._heads, self._heads.scratch(max_num_reqs, self.device))
        self._caches = []
        for layer in self._layers.values():
            shape = (num_blocks, block_size, layer.num_kv_heads, 2 * layer.head_size)
            cache = torch.zeros(shape, dtype=self.config.model_config.dtype, device=self.device)
            layer.kv_cache = cache.transpose(1, 2)
            self._caches.append(cache)

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy KV blocks; pairs: int64 [n, 2], source and destination."""
        for cache in self._caches:
            cache[pairs[:, 1]] = cache[pairs[:, 0]]

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        table: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        *,
        planned: bool = False,
    ) -> torch.Tensor:
        """Run the model and write its KV: hidden states [tokens, hidden].

        ids: int32 [tokens], positions and slots: int64 [tokens]; query_start_loc: int32 [n + 1], seq_lens: int32 [n], table: int32 [n,
        blocks]. All on the drafter's device. `planned`: how attention is spread over the device is worked out once, not in every layer;
        for calls with the same few tokens for each request, which are captured.
        """
        inputs = {"input_ids": ids, "positions": positions}
        states: torch.Tensor = self._run(inputs, slots, query_start_loc, seq_lens, table, max_query_len, max_seq_len, planned=planned)
        return states

    def _run(
        self,
        inputs: dict[str, torch.Tensor],
        slots: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        table: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        *,
        planned: bool,
    ) -> Any:
        num_tokens = slots.shape[0]
        metadata: DraftStep | FlashAttentionMetadata
        if planned and self._fused is not None and max_query_len <= self.most_fused:
            metadata = DraftStep(*self._fused, table, seq_lens, slots)
        else:
            metadata = FlashAttentionMetadata(
                num_actual_tokens=num_tokens,
                max_query_len=max_query_len,
                query_start_loc=query_start_loc,
                max_seq_len=max_seq_len,
                seq_lens=seq_lens,
                block_table=table,
                slot_mapping=slots,
                scheduler_metadata=self._plan(query_start_loc, seq_lens, max_query_len, max_seq_len) if planned else None,
                max_num_splits=self._splits if planned else 0,
            )
        by_layer = dict.fromkeys(self._layers, metadata)
        with (
            self._environment(),
            set_forward_context(by_layer, self.config, num_tokens=num_tokens, slot_mapping=dict.fromkeys(self._layers, slots)),
        ):
            return self._forward(inputs, metadata)

    def _forward(self, inputs: dict[str, torch.Tensor], metadata: DraftStep | FlashAttentionMetadata) -> Any:
        """Run the layers on tokens whose attention is arranged."""
        return self._model(**inputs)

    def _plan(self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int, max_seq_len: int) -> torch.Tensor | None:
        if not self._splits:
            return None
        from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata  # on CUDA only

        layer = next(iter(self._layers.values()))
        return get_scheduler_metadata(
            batch_size=seq_lens.shape[0],
            max_seqlen_q=max_query_len,
            max_seqlen_k=max_seq_len,
            num_heads_q=layer.num_heads,
            num_heads_kv=layer.num_kv_heads,
            headdim=layer.head_size,
            cache_seqlens=seq_lens,
            qkv_dtype=self.config.model_config.dtype,
            cu_seqlens_q=query_start_loc,
            page_size=self._block_size,
            causal=True,
            window_size=_NO_WINDOW,
            num_splits=self._splits,
        )

    @contextmanager
    def building(self) -> Iterator[None]:
        """vLLM's current configuration is the drafter's: for the first calls, which may compile."""
        with set_current_vllm_config(self.config):
            yield

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] of hidden states [n, hidden]."""
        with self._environment():
            return self._model.compute_logits(hidden)

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """The group of this rank alone and the drafter's choice of operators, while the model is built or run."""
        with ExitStack() as stack:
            stack.enter_context(self._priority.set_priority())
            if self._group is not None:
                stack.enter_context(_active_group(self._group))
            yield


@contextmanager
def _active_group(group: GroupCoordinator) -> Iterator[None]:
    # Layers ask this module for the group, when they are built and when they run; vLLM has no parameter for it.
    target = parallel_state._TP  # noqa: SLF001
    parallel_state._TP = group  # noqa: SLF001
    try:
        yield
    finally:
        parallel_state._TP = target  # noqa: SLF001


@contextmanager
def _own_rotary_cache() -> Iterator[None]:
    """Keep the models from sharing a rotary embedding: the module would move to the device of whoever used it last."""
    shared = rotary_embedding._ROPE_DICT  # noqa: SLF001
    targets = dict(shared)
    shared.clear()
    try:
        yield
    finally:
        shared.clear()
        shared.update(targets)
