"""What an EAGLE head should draft, worked out from its weights alone: no cache, every row anew, in float32."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


@dataclass(frozen=True)
class Seen:
    """What the target makes of n tokens. last: [n, hidden], its last hidden states; layers: one such for each layer that EAGLE-3 reads;
    following: int64 [n], the most likely token after each."""

    last: torch.Tensor
    layers: list[torch.Tensor]
    following: torch.Tensor

    def sources(self, method: str) -> list[torch.Tensor]:
        """What a head of this method reads."""
        return self.layers if method == "eagle3" else [self.last]


class ReferenceTarget:
    """A Llama in transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        layers = self._model.config.num_hidden_layers
        self._read = (2, layers // 2, layers - 3)

    @torch.inference_mode()
    def run(self, tokens: list[int]) -> Seen:
        """All tokens at once."""
        result = self._model(torch.tensor([tokens]), output_hidden_states=True)
        states = [state[0] for state in result.hidden_states]
        return Seen(states[-1], [states[index] for index in self._read], result.logits[0].argmax(dim=-1))


class ReferenceHead:
    """A head of `tests.gpu.heads`."""

    def __init__(self, folder: Path, target: Path, method: str) -> None:
        self._method = method
        self._weights = {
            name: weight.float() if weight.is_floating_point() else weight
            for name, weight in load_file(folder / "model.safetensors").items()
        }
        ends = load_file(target / "model.safetensors")
        self._embedding = ends["model.embed_tokens.weight"].float()
        self._output = self._weights.get("lm_head.weight", ends.get("lm_head.weight", ends["model.embed_tokens.weight"]).float())
        config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
        self._heads, self._eps = config.num_attention_heads, config.rms_norm_eps
        self._rotary = LlamaRotaryEmbedding(config)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], sources: list[torch.Tensor], count: int) -> list[int]:
        """`count` tokens after `tokens`; sources: the target's hidden states of all tokens but the last."""
        hidden = torch.cat(sources, dim=1)
        if self._method == "eagle3":
            hidden = hidden @ self._weights["fc.weight"].T
        read, found = tokens[1:], []
        for _ in range(count):
            last, feed = self._run(torch.tensor(read), hidden)
            row = int((last[-1] @ self._output.T).argmax())
            token = row + int(self._weights["d2t"][row]) if self._method == "eagle3" else row
            found.append(token)
            read, hidden = [*read, token], torch.cat([hidden, feed[-1:]])
        return found

    def _run(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self._embedding[tokens]
        if self._method == "eagle":
            mixed = torch.cat([embedded, hidden], dim=1) @ self._weights["fc.weight"].T
            mixed = mixed + self._attend("layers.0", mixed)
            mixed = mixed + self._feed("layers.0", self._norm("layers.0.post_attention_layernorm", mixed))
            return mixed, mixed
        inputs = torch.cat([self._norm("midlayer.input_layernorm", embedded), self._norm("midlayer.hidden_norm", hidden)], dim=1)
        mixed = hidden + self._attend("midlayer", inputs)
        mixed = mixed + self._feed("midlayer", self._norm("midlayer.post_attention_layernorm", mixed))
        return self._norm("norm", mixed), mixed

    def _norm(self, name: str, states: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states, states.shape[-1:], self._weights[f"{name}.weight"], self._eps)

    def _feed(self, layer: str, states: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self._weights[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return (functional.silu(states @ gate) * (states @ up)) @ down

    def _attend(self, layer: str, states: torch.Tensor) -> torch.Tensor:
        rows = len(states)
        query, key, value = (
            (states @ self._weights[f"{layer}.self_attn.{name}_proj.weight"].T).view(1, rows, self._heads, -1).transpose(1, 2)
            for name in "qkv"
        )
        query, key = apply_rotary_pos_emb(query, key, *self._rotary(value, torch.arange(rows)[None]))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(rows, -1) @ self._weights[f"{layer}.self_attn.o_proj.weight"].T
