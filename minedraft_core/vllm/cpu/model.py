"""The draft model in the draft process: vLLM's own model code, attention and KV cache layout, driven without an engine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
    get_kv_cache_spec,
    init_attn_backend,
    init_kv_cache,
)
from vllm.v1.worker.worker_base import get_current_attn_backends, get_supported_kv_cache_layouts, record_kv_cache_layout

from minedraft_core.drafter import DRAFT_VOCABULARY
from minedraft_core.vllm.cpu.head import DraftHead, ScoringHead, narrow_scores
from minedraft_core.vllm.cpu.messages import DraftProcessConfig
from minedraft_core.vllm.cpu.noise import Draw
from minedraft_core.vllm.cpu.query import Chosen, Query

_DEVICE = torch.device("cpu")
_BLOCK_SIZE = 32


class DraftModel:
    """A causal LM with a paged KV cache of its own."""

    def __init__(self, config: DraftProcessConfig) -> None:
        """Load the model. Raises what vLLM raises where it cannot."""
        self._config = EngineArgs(
            model=config.model,
            tokenizer=config.target_model,
            dtype=config.dtype,
            max_num_seqs=config.max_num_seqs,
            enforce_eager=True,
            block_size=_BLOCK_SIZE,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 20,
            trust_remote_code=config.trust_remote_code,
            skip_tokenizer_init=True,
        ).create_engine_config()
        model_config = self._config.model_config
        model_config.max_model_len = self.max_context = min(config.max_model_len, model_config.max_model_len)
        with set_current_vllm_config(self._config):
            self._initialise(config)

    def _initialise(self, config: DraftProcessConfig) -> None:
        vllm_config: VllmConfig = self._config
        # vLLM's loader empties the accelerator's cache; its own CPU runner switches that off the same way.
        _set_torch_accelerator_to_noop()
        with tempfile.TemporaryDirectory() as folder:
            init_distributed_environment(1, 0, f"file://{Path(folder, 'rendezvous')}", 0, backend="gloo")
            initialize_model_parallel(1, 1)
        self._model = get_model(vllm_config=vllm_config)
        vocab_size = vllm_config.model_config.get_vocab_size()
        if vocab_size != config.vocab_size:
            raise ValueError(
                f"the draft model {config.model} has {vocab_size} tokens, the target {config.vocab_size}: they must share a tokenizer"
            )
        head = ScoringHead if config.scored else DraftHead
        self._head = self._build_head(head, Path(config.model, DRAFT_VOCABULARY), vocab_size)
        specs = get_kv_cache_spec(vllm_config)
        backends = get_current_attn_backends(vllm_config)
        layouts = [[layout.name for layout in get_supported_kv_cache_layouts(backends)]]
        layout = resolve_kv_cache_layout(vllm_config, layouts, list(specs.values()))
        record_kv_cache_layout(vllm_config.cache_config, layout.name)
        current_platform.update_block_size_for_backend(vllm_config)
        page_bytes = sum(spec.page_size_bytes for spec in specs.values())
        wanted = 1 + -(-max(config.kv_tokens, self.max_context) // vllm_config.cache_config.block_size)
        cache = get_kv_cache_configs(vllm_config, [specs], [wanted * page_bytes])[0]
        groups, _, kernel_sizes = init_attn_backend(cache, vllm_config, _DEVICE)
        if len(cache.kv_cache_groups) != 1:
            raise ValueError(f"the draft model {config.model} mixes kinds of attention, which the CPU drafter does not support")
        init_kv_cache(
            vllm_config.compilation_config.static_forward_context,
            cache,
            _DEVICE,
            kernel_sizes,
            vllm_config,
            attn_groups=[group for members in groups for group in members],
        )
        self._cache, self._groups = cache, groups
        self.num_blocks, self.block_size = cache.num_blocks, kernel_sizes[0]

    def _build_head(self, head: type[DraftHead], narrow: Path, vocab_size: int) -> DraftHead:
        if not narrow.exists():
            return head(self._model.compute_logits, torch.arange(vocab_size), vocab_size)
        token_ids = load_file(narrow)["token_ids"]
        return head(narrow_scores(self._model.lm_head.weight, token_ids), token_ids, vocab_size)

    def run(self, queries: Sequence[Query]) -> None:
        """Run the queries in one pass, for their entries in the KV cache."""
        self._forward(queries)

    @torch.inference_mode()
    def choose(self, queries: Sequence[Query], draws: Sequence[Draw | None]) -> Chosen:
        """Run the queries in one pass; the token after each one, drawn where `draws` says so, else the most likely."""
        ends = torch.tensor([len(query.tokens) for query in queries]).cumsum(0)
        return self._head.choose(self._forward(queries)[ends - 1], draws)

    @torch.inference_mode()
    def _forward(self, queries: Sequence[Query]) -> torch.Tensor:
        lengths = torch.tensor([len(query.tokens) for query in queries], dtype=torch.int32)
        starts = torch.tensor([query.start for query in queries], dtype=torch.int32)
        ends = torch.cumsum(lengths, 0, dtype=torch.int32)
        query_start = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
        owner = torch.repeat_interleave(torch.arange(len(queries)), lengths)
        positions = (torch.arange(int(ends[-1])) - query_start[owner] + starts[owner]).long()
        tokens = torch.tensor([token for query in queries for token in query.tokens], dtype=torch.int32)
        table = torch.zeros((len(queries), max(len(query.blocks) for query in queries)), dtype=torch.int32)
        for row, query in enumerate(queries):
            table[row, : len(query.blocks)] = torch.tensor(query.blocks, dtype=torch.int32)
        slots = table[owner, positions // self.block_size].long() * self.block_size + positions % self.block_size
        seq_lens = starts + lengths
        metadata = build_attn_metadata(
            self._groups,
            len(queries),
            tokens.numel(),
            query_start,
            query_start,
            int(lengths.max()),
            seq_lens,
            int(seq_lens.max()),
            [table],
            slots[None],
            self._cache,
            seq_lens_cpu_upper_bound=seq_lens,
        )
        by_layer = build_slot_mappings_by_layer(slots[None], self._cache)
        with (
            set_current_vllm_config(self._config),
            set_forward_context(metadata, self._config, num_tokens=tokens.numel(), slot_mapping=by_layer),
        ):
            hidden: torch.Tensor = self._model(input_ids=tokens, positions=positions)
        return hidden
