"""Checkpoints written from others: a GGUF file as a Llama folder, and a Llama folder with fewer layers.

Run as a process of its own (`python -m minedraft_core.conversion`), so that the caller neither loads torch nor keeps its memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

_WEIGHTS = "model.safetensors"


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write the Llama model and tokenizer of a GGUF file into the folder `out`, weights in bfloat16.

    The digits of a number are split one by one, as the file's `smollm` pre-tokenizer means (llama.cpp, `llama-vocab.cpp`);
    transformers leaves this out.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)
    model.save_pretrained(out)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    byte_level = tokenizer.backend_tokenizer.pre_tokenizer
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(out)


def truncate_layers(target: Path, out: Path, layers: int) -> None:
    """Write the first `layers` decoder layers of a Llama folder, with its embedding, norm, head and tokenizer, into the folder `out`."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    if not 1 <= layers <= config["num_hidden_layers"]:
        raise ValueError(f"{layers} layers of a model with {config['num_hidden_layers']}; allowed: 1 to {config['num_hidden_layers']}")
    with safe_open(target / _WEIGHTS, framework="pt") as weights:
        kept = {name: weights.get_tensor(name) for name in weights.keys() if _layer(name) < layers}  # noqa: SIM118 -- not a mapping
    save_file(kept, out / _WEIGHTS, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}, indent=2) + "\n")
    for path in target.iterdir():
        if path.name not in {_WEIGHTS, "config.json", "manifest.json"}:
            shutil.copyfile(path, out / path.name)


def _layer(name: str) -> int:
    """The decoder layer that a tensor belongs to; -1 for a tensor outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def main() -> None:
    """Read the command line and write one folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source in (("gguf", "a GGUF file"), ("truncate", "a Llama folder")):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path, help=source)
        command.add_argument("out", type=Path, help="an empty folder")
    commands.choices["truncate"].add_argument("--layers", type=int, required=True, help="decoder layers to keep")
    arguments = parser.parse_args()
    if arguments.command == "gguf":
        convert_gguf(arguments.source, arguments.out)
    else:
        truncate_layers(arguments.source, arguments.out, arguments.layers)


if __name__ == "__main__":
    main()
