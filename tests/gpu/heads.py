"""Checkpoints for the checks of EAGLE: heads of a Llama target, and a random target that such a head can guess. All seeded.

`python -m tests.gpu.heads target TOKENIZER OUT` and `python -m tests.gpu.heads eagle|eagle3 TARGET OUT`.

The random target's layers add little to its embedding, so the token that follows depends on the last one most and on the context a
little. A head carries the last token's embedding through, with some of the target's hidden states and of the attention's result in it:
it is right often, and what it drafts changes where a hidden state, a position or a cache entry is wrong.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8}
_LAYERS_SHARE = 0.06
_HIDDEN_SHARE = 0.12
_ATTENTION_SHARE = 0.4
_SHARPNESS = 0.9
_SKIPPED = 5  # an EAGLE-3 head leaves out every so manieth token


def write_target(out: Path, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """A random Llama, without a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, initializer_range=1.0, max_position_embeddings=2048, tie_word_embeddings=False, **_SIZES)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed_tokens" not in name:
                share = _LAYERS_SHARE if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                weight.normal_(0, share / weight.shape[1] ** 0.5)
    model.to(dtype).save_pretrained(out)


def write_target_with_tokenizer(out: Path, source: Path) -> None:
    """A random Llama with the tokenizer of the folder `source`."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    write_target(out, len(tokenizer))
    tokenizer.save_pretrained(out)


def write_head(out: Path, target: Path, method: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """A head of the method `eagle` or `eagle3` for the Llama in the folder `target`."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    generator = torch.Generator().manual_seed(1)
    weights = _eagle(hidden, config, generator) if method == "eagle" else _eagle3(target, hidden, config, generator)
    save_file(
        {name: weight.to(dtype).contiguous() if weight.is_floating_point() else weight for name, weight in weights.items()},
        out / "model.safetensors",
    )
    head = {**config, "num_hidden_layers": 1, "num_key_value_heads": heads, "head_dim": hidden // heads, "tie_word_embeddings": False}
    if method == "eagle3":
        head |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(weights["d2t"])}
    (out / "config.json").write_text(json.dumps(head, indent=2) + "\n")


def _random(generator: torch.Generator, rows: int, columns: int, share: float = 1.0) -> torch.Tensor:
    """Of a vector with entries around 1 it makes one with entries around `share`."""
    return torch.randn(rows, columns, generator=generator) * share / columns**0.5


def _eagle(hidden: int, config: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    inner = config["intermediate_size"]
    fc = torch.cat([torch.eye(hidden), _random(generator, hidden, hidden, _HIDDEN_SHARE)], dim=1)
    return {
        "fc.weight": fc,
        "layers.0.self_attn.q_proj.weight": _random(generator, hidden, hidden),
        "layers.0.self_attn.k_proj.weight": _random(generator, hidden, hidden),
        "layers.0.self_attn.v_proj.weight": _random(generator, hidden, hidden),
        "layers.0.self_attn.o_proj.weight": _random(generator, hidden, hidden, _ATTENTION_SHARE),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
        "layers.0.mlp.gate_proj.weight": _random(generator, inner, hidden),
        "layers.0.mlp.up_proj.weight": _random(generator, inner, hidden),
        "layers.0.mlp.down_proj.weight": _random(generator, hidden, inner, _HIDDEN_SHARE),
    }


def _eagle3(target: Path, hidden: int, config: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The new token's embedding comes in by attention alone: a row attends most to itself, and its value is the embedding turned."""
    inner = config["intermediate_size"]
    turned = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))[0]
    kept = torch.tensor([token for token in range(config["vocab_size"]) if token % _SKIPPED != _SKIPPED - 1])
    known = torch.zeros(config["vocab_size"], dtype=torch.bool)
    known[kept] = True
    scores = _random(generator, hidden, hidden) * _SHARPNESS**0.5
    return {
        "fc.weight": _random(generator, hidden, 3 * hidden, _HIDDEN_SHARE),
        "midlayer.hidden_norm.weight": torch.full((hidden,), 0.5),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": torch.cat([scores, torch.zeros(hidden, hidden)], dim=1),
        "midlayer.self_attn.k_proj.weight": torch.cat([scores, _random(generator, hidden, hidden, _ATTENTION_SHARE)], dim=1),
        "midlayer.self_attn.v_proj.weight": torch.cat([turned, _ATTENTION_SHARE * turned], dim=1),
        "midlayer.self_attn.o_proj.weight": turned.T,
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.mlp.gate_proj.weight": _random(generator, inner, hidden),
        "midlayer.mlp.up_proj.weight": _random(generator, inner, hidden),
        "midlayer.mlp.down_proj.weight": _random(generator, hidden, inner, _HIDDEN_SHARE),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": _head_of(target)[kept].float(),
        "d2t": kept - torch.arange(len(kept)),
        "t2d": known,
    }


def _head_of(target: Path) -> torch.Tensor:
    with safe_open(target / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        return weights.get_tensor("lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight")


def main() -> None:
    """Read the command line and write one folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["target", "eagle", "eagle3"])
    parser.add_argument("source", type=Path, help="a folder: of the tokenizer, or of the head's target")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.kind == "target":
        write_target_with_tokenizer(arguments.out, arguments.source)
    else:
        write_head(arguments.out, arguments.source, arguments.kind)


if __name__ == "__main__":
    main()
