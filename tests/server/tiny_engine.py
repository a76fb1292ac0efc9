"""vLLM on CPU with a model of random weights that loads in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from minedraft_core.config import MineDraftConfig, PipelineConfig
from minedraft_core.vllm.args import with_pipeline
from tests.server.scripts import make_tokenizer

NUM_DRAFTS = 3
MODES = ("off", "sequential", "parallel")


def write_model(folder: Path) -> None:
    """Save a Llama of two small layers with the tests' tokenizer."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def start_engine(folder: Path, mode: str, **fields: Any) -> AsyncLLM:
    """An engine in one of MODES that drafts with its own target, so that every greedy draft is accepted. `fields` are arguments of vLLM."""
    speculative = {"model": str(folder), "num_speculative_tokens": NUM_DRAFTS, "is_parallel": mode == "parallel"} if mode != "off" else None
    defaults: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": True,
        "disable_log_stats": True,
        "seed": 0,
        "per_request_spec_decode_metrics": "none" if mode == "off" else "summary",
    }
    args = AsyncEngineArgs(**{**defaults, **fields})
    return AsyncLLM.from_engine_args(with_pipeline(args, PipelineConfig(speculative=MineDraftConfig.parse(speculative))))
