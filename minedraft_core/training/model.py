"""The drafter: a Llama of few layers that shares the target's embedding and its head over the frequent tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from minedraft_core.config import ConfigError
from minedraft_core.drafter import DRAFT_VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def drafter_config(target: Any, layers: int, intermediate_size: int) -> LlamaConfig:
    """The drafter's configuration from the target's: same width, heads and rotary embedding, fewer and narrower layers.

    Raises ConfigError where the target's configuration lacks what a Llama needs.
    """
    try:
        head_dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
        return LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=getattr(target, "num_key_value_heads", None) or target.num_attention_heads,
            head_dim=head_dim,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=getattr(target, "rms_norm_eps", 1e-5),
            rope_parameters=dict(getattr(target, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10_000.0}),
            bos_token_id=target.bos_token_id,
            eos_token_id=target.eos_token_id,
            pad_token_id=target.pad_token_id,
            tie_word_embeddings=bool(target.tie_word_embeddings),
        )
    except AttributeError as error:
        raise ConfigError(f"a Llama drafter cannot be shaped after {target.model_type!r}: {error}") from error


def spread(layers: int, of: int) -> list[int]:
    """The target's layers that the drafter's start from: evenly spread, the first and the last among them where there are two or more."""
    return [round(index * (of - 1) / max(1, layers - 1)) for index in range(layers)]


def _narrowed(weights: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """Keep the `width` units of a gated MLP whose weights are largest."""
    gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    keep = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).topk(width).indices.sort().values
    return weights | {
        "mlp.gate_proj.weight": gate[keep],
        "mlp.up_proj.weight": up[keep],
        "mlp.down_proj.weight": down[:, keep],
    }


class Drafter:
    """A drafter at work: its causal model, and the ids of the tokens it can propose."""

    def __init__(self, model: LlamaForCausalLM, token_ids: Tensor) -> None:
        """`token_ids` is int64 [m], ascending."""
        self.model = model
        self.token_ids = token_ids.to(model.device)
        self._head = model.get_output_embeddings().weight.detach()[self.token_ids]

    @classmethod
    def start(cls, target: PreTrainedModel, layers: int, intermediate_size: int, token_ids: Tensor, seed: int) -> Drafter:
        """An untrained drafter: layers in float32 from the target's where their shapes fit, embedding and head the target's own, frozen.

        Raises ConfigError where the target's output head has a bias, which a Llama cannot take over.
        """
        if getattr(target.get_output_embeddings(), "bias", None) is not None:
            raise ConfigError("the target's output head has a bias; a Llama drafter cannot share it")
        torch.manual_seed(seed)
        model = LlamaForCausalLM(drafter_config(target.config, layers, intermediate_size)).float()
        base = target.base_model
        sources = getattr(base, "layers", None)
        if sources is not None:
            for own, index in zip(model.model.layers, spread(layers, len(sources)), strict=True):
                weights = {name: value.detach().float() for name, value in sources[index].state_dict().items()}
                if weights.get("mlp.gate_proj.weight", torch.empty(0)).shape[0] > intermediate_size:
                    weights = _narrowed(weights, intermediate_size)
                shapes = {name: value.shape for name, value in own.state_dict().items()}
                fitting = {name: value for name, value in weights.items() if shapes.get(name) == value.shape}
                own.load_state_dict(fitting, strict=False)
            if getattr(getattr(base, "norm", None), "weight", None) is not None:
                model.model.norm.load_state_dict({"weight": base.norm.weight.detach().float()})
        model.to(target.device)
        model.model.embed_tokens.weight = nn.Parameter(target.get_input_embeddings().weight.detach(), requires_grad=False)
        model.lm_head.weight = nn.Parameter(target.get_output_embeddings().weight.detach(), requires_grad=False)
        return cls(model, token_ids)

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> Drafter:
        """Read a checkpoint folder; without a draft vocabulary beside it every token can be proposed."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        side = folder / DRAFT_VOCABULARY
        if side.exists():
            with safe_open(side, framework="pt") as file:
                return cls(model, file.get_tensor("token_ids"))
        return cls(model, torch.arange(model.config.vocab_size))

    def trained(self) -> dict[str, Tensor]:
        """The drafter's own weights by their names in the checkpoint: layers and final norm, without embedding and head."""
        return {
            name: value
            for name, value in self.model.state_dict().items()
            if ".embed_tokens." not in name and not name.startswith("lm_head.")
        }

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [n, L] -> logits [n, L, m] over `token_ids`."""
        hidden: Tensor = self.model.model(input_ids=tokens.long(), use_cache=False).last_hidden_state
        return hidden @ self._head.to(hidden.dtype).T


def draft_vocabulary(frequencies: Tensor, size: int, always: tuple[int, ...]) -> Tensor:
    """The `size` most frequent token ids, with those of `always` among them: int64 [size], ascending."""
    ranked = frequencies.clone()
    ranked[list(always)] = frequencies.max() + 1
    return ranked.topk(size).indices.sort().values
