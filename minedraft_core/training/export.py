"""The drafter as files: a compact 8-bit one without embedding and head, and a Hugging Face checkpoint put together with the target's.

`python -m minedraft_core.training.export PACKED TARGET OUT` puts the two together.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from minedraft_core.drafter import DRAFT_VOCABULARY
from minedraft_core.training.model import Drafter

_FORMAT = "minedraft-drafter-1"
_SCALE = ".scale"
# safetensors keeps what it writes to its owner, and a server often runs as another user.
_READABLE = 0o644
_TOKENIZER_FILES = (
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> int8 [rows, columns] and float32 scales [rows]; an entry is off by half a scale at most."""
    scale = (weight.float().abs().amax(1) / 127).clamp(min=1e-12)
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def pack(drafter: Drafter, path: Path) -> None:
    """Write the drafter's own weights in 8 bits, its configuration and its draft vocabulary to one safetensors file."""
    tensors: dict[str, Tensor] = {"token_ids": drafter.token_ids.to("cpu", torch.int32)}
    for name, weight in drafter.trained().items():
        if weight.ndim == 2:
            tensors[name], tensors[name + _SCALE] = (part.cpu() for part in quantise(weight))
        else:
            tensors[name] = weight.float().cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": _FORMAT, "config": json.dumps(drafter.model.config.to_diff_dict())})
    path.chmod(_READABLE)


def unpack(path: Path) -> tuple[LlamaConfig, dict[str, Tensor], Tensor]:
    """Read a file of `pack`: configuration, float32 weights by name, token ids int64 [m].

    Raises ValueError where the file is no such file.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} is not a packed drafter (format {metadata.get('format')!r}, expected {_FORMAT!r})")
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (the handle is no mapping)
    token_ids = stored.pop("token_ids").long()
    weights = {
        name: value.float() * stored[name + _SCALE][:, None] if value.dtype == torch.int8 else value
        for name, value in stored.items()
        if not name.endswith(_SCALE)
    }
    return LlamaConfig(**json.loads(metadata["config"])), weights, token_ids


def save_checkpoint(model: LlamaForCausalLM, token_ids: Tensor, target: Path, out: Path) -> None:
    """Write a Hugging Face folder that any Llama loader takes: weights, tokenizer files of the target, the draft vocabulary beside them.

    The index names the files that hold weights, so that a loader which reads every safetensors file leaves the vocabulary alone.
    """
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    with safe_open(out / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    (out / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "metadata": {"total_size": (out / "model.safetensors").stat().st_size},
                "weight_map": dict.fromkeys(names, "model.safetensors"),
            }
        )
    )
    save_file({"token_ids": token_ids.to("cpu", torch.int64)}, out / DRAFT_VOCABULARY)
    for path in out.glob("*.safetensors"):
        path.chmod(_READABLE)
    for pattern in _TOKENIZER_FILES:
        for source in target.glob(pattern):
            shutil.copyfile(source, out / source.name)


def assemble(packed: Path, target_dir: Path, out_dir: Path) -> None:
    """Put a packed drafter and its target's embedding and head together to a bfloat16 Llama checkpoint in `out_dir`.

    Raises ValueError where the target in `target_dir` is not of the shape that the drafter was trained for.
    """
    config, weights, token_ids = unpack(packed)
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16)
    shape = tuple(target.get_input_embeddings().weight.shape)
    if shape != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"{packed.name} is for a target with an embedding of {(config.vocab_size, config.hidden_size)}, but {target_dir} has {shape}"
        )
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    missing = set(model.state_dict()) - set(weights) - {"model.embed_tokens.weight", "lm_head.weight"}
    if missing:
        raise ValueError(f"{packed} lacks weights: {', '.join(sorted(missing))}")
    model.load_state_dict(weights, strict=False)
    model.model.embed_tokens.weight = nn.Parameter(target.get_input_embeddings().weight.detach())
    model.lm_head.weight = nn.Parameter(target.get_output_embeddings().weight.detach())
    save_checkpoint(model, token_ids, target_dir, out_dir)
    card = packed.with_suffix(".md")
    if card.exists():
        shutil.copyfile(card, out_dir / "README.md")


def main() -> None:
    """Read the command line and write one checkpoint folder."""
    parser = argparse.ArgumentParser(description="Put a packed drafter together with its target's embedding and head.")
    parser.add_argument("packed", type=Path, help="a file that `minedraft drafter train` wrote")
    parser.add_argument("target", type=Path, help="the folder of its target")
    parser.add_argument("out", type=Path, help="an empty folder")
    arguments = parser.parse_args()
    assemble(arguments.packed, arguments.target, arguments.out)


if __name__ == "__main__":
    main()
