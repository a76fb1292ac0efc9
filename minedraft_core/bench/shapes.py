"""Folders with a model's shape and no weights, for speed runs with `--load-format dummy --skip-tokenizer-init`.

`python -m minedraft_core.bench.shapes FOLDER` writes one folder for each model. The figures are those of the models' public config.json
files. A head of EAGLE is one layer of its target's shape; one of EAGLE-3 drafts from 32,000 tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "sliding_window": None,
    "use_sliding_window": False,
}
_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
}
_VICUNA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _sized(family: dict[str, Any], hidden: int, layers: int, heads: int, intermediate: int, **more: Any) -> dict[str, Any]:
    return {
        **family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _sized(_QWEN3, 1024, 28, 16, 3072, tie_word_embeddings=True),
    "qwen3-1.7b": _sized(_QWEN3, 2048, 28, 16, 6144, tie_word_embeddings=True),
    "qwen3-4b": _sized(_QWEN3, 2560, 36, 32, 9728, tie_word_embeddings=True),
    "qwen3-8b": _sized(_QWEN3, 4096, 36, 32, 12288),
    "qwen3-14b": _sized(_QWEN3, 5120, 40, 40, 17408),
    "qwen3-32b": _sized(_QWEN3, 5120, 64, 64, 25600),
    "qwen3-30b-a3b": _sized(
        _QWEN3,
        2048,
        48,
        32,
        6144,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "qwen3-235b-a22b-fp8": _sized(
        _QWEN3,
        4096,
        94,
        64,
        12288,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_key_value_heads=4,
        rope_theta=5000000,
        max_position_embeddings=262144,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "llama-3.3-70b": _sized(_LLAMA3, 8192, 80, 64, 28672),
    "llama-3.1-8b": _sized(_LLAMA3, 4096, 32, 32, 14336),
    "llama-3.2-1b": _sized(
        _LLAMA3,
        2048,
        16,
        32,
        8192,
        head_dim=64,
        tie_word_embeddings=True,
        rope_scaling={**_LLAMA3["rope_scaling"], "factor": 32.0},
    ),
    "vicuna-33b": _sized(_VICUNA, 6656, 60, 52, 17920, num_key_value_heads=52),
    "vicuna-13b": _sized(_VICUNA, 5120, 40, 40, 13824, num_key_value_heads=40, max_position_embeddings=4096, rms_norm_eps=1e-5),
    "vicuna-7b": _sized(_VICUNA, 4096, 32, 32, 11008, num_key_value_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-5),
}


def _head(target: str, **more: Any) -> dict[str, Any]:
    # vLLM runs heads of Qwen3, too, as Llama layers.
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return {**SHAPES[target], **llama, "num_hidden_layers": 1, "tie_word_embeddings": False, **more}


_EAGLE3: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}

HEAD_SHAPES: dict[str, dict[str, Any]] = {
    "vicuna-7b-eagle": _head("vicuna-7b"),
    "vicuna-13b-eagle": _head("vicuna-13b"),
    "vicuna-33b-eagle": _head("vicuna-33b"),
    "llama-3.1-8b-eagle3": _head("llama-3.1-8b", **_EAGLE3),
    "qwen3-8b-eagle3": _head("qwen3-8b", **_EAGLE3),
    "qwen3-32b-eagle3": _head("qwen3-32b", **_EAGLE3),
}


def write_shapes(folder: Path) -> None:
    """Write every shape into a folder of its name."""
    for name, config in (SHAPES | HEAD_SHAPES).items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Read the command line and write the folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the folders go")
    write_shapes(parser.parse_args().folder)


if __name__ == "__main__":
    main()
