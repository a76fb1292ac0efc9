"""The layers of a draft model in five kernels each: QKV product; norm, rotation, KV and attention; three more products with two norms.

For the decoders of Llama, Qwen2 and Qwen3, whose layers are the same but for biases and the norms of queries and keys. vLLM builds and
loads the model and runs its prompts; the weights are the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from minedraft_core.vllm.gpu.decode import DraftStep, Heads, Turn, decode
from minedraft_core.vllm.gpu.products import FEW_ROWS, MOST_ROWS, Matrix, Norm, Products, Workspace
from minedraft_core.vllm.gpu.weights import EIGHT_BITS, EightBitLinear, eight_bits

DECODERS = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_HEAD_ROWS = 16384  # of a head at once, for less memory


class UnsupportedError(ValueError):
    """A model whose layers are other than these; the message says in what."""


@dataclass(frozen=True)
class Layer:
    """One layer. `norms`: of the heads of queries and keys, [head] each, if the model has them."""

    before_attention: Norm
    qkv: Matrix
    norms: tuple[torch.Tensor, torch.Tensor] | None
    head_eps: float
    attention: Any
    output: Matrix
    before_mlp: Norm
    gate_up: Matrix
    down: Matrix

    @property
    def eight(self) -> bool:
        """Whether its weights are in 8 bits."""
        return self.down.scales is not None

    @property
    def matrices(self) -> Iterator[tuple[Matrix, bool]]:
        """All weights, and whether their product is gated."""
        yield from ((self.qkv, False), (self.output, False), (self.gate_up, True), (self.down, False))


@dataclass(frozen=True)
class Head:
    """The output head, whose rows may be more than the tokens there are."""

    matrix: Matrix
    vocab_size: int

    def logits(self, products: Products, states: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """Logits [n, vocabulary] of normed states [n, hidden]."""
        return products.multiply(states, self.matrix, workspace)[:, : self.vocab_size]


@dataclass(frozen=True)
class Layers:
    """All layers of a model; `angles` as in `Turn`. `head`: None where it does more than a product."""

    layers: tuple[Layer, ...]
    angles: torch.Tensor
    products: Products
    head: Head | None

    @property
    def most_rows(self) -> int:
        """Rows up to which vLLM's kernels take longer. They would widen weights in 8 bits first."""
        return MOST_ROWS if self.layers[0].eight else FEW_ROWS

    def workspace(self) -> Workspace:
        """Room for the products of all layers."""
        matrices = [pair for layer in self.layers for pair in layer.matrices]
        if self.head is not None:
            matrices.append((self.head.matrix, False))
        return self.products.workspace(matrices, self.angles.device)

    def run(self, states: torch.Tensor, positions: torch.Tensor, step: DraftStep, workspace: Workspace) -> torch.Tensor:
        """Run embedded tokens [tokens, hidden] at positions int64 [tokens] through the layers and write their KV.

        Returns the residual stream, in the same tensor.
        """
        heads, products = step.heads, self.products
        counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        fed = products.feed(states, self.layers[0].before_attention)
        for layer, following in zip(self.layers, (*self.layers[1:], None), strict=True):
            turn = Turn(positions, self.angles, layer.norms, layer.head_eps, products.chained)
            joined = products.multiply(fed, layer.qkv, workspace).unflatten(1, (-1, heads.head_size))
            query, key, value = joined.split(counts, dim=1)
            attended = torch.empty_like(query, memory_format=torch.contiguous_format)
            decode(step, query, key, value, layer.attention.kv_cache, attended, layer.attention.impl.scale, turn)
            fed = products.add_feeding(attended.flatten(1), layer.output, workspace, states, layer.before_mlp)
            widened = products.multiply(fed, layer.gate_up, workspace, gated=True)
            if following is None:
                products.add(widened, layer.down, workspace, states)
            else:
                fed = products.add_feeding(widened, layer.down, workspace, states, following.before_attention)
        return states


def read_layers(model: nn.Module, heads: Heads, *, chained: bool) -> Layers:
    """The layers of a model that vLLM has loaded. Raises UnsupportedError for others than `DECODERS` and for quantized ones."""
    if type(model) not in DECODERS:
        raise UnsupportedError(f"is a {type(model).__name__}, not one of {', '.join(kind.__name__ for kind in DECODERS)}")
    decoder: Any = model.model
    rotary = decoder.layers[0].self_attn.rotary_emb
    whole = isinstance(rotary, RotaryEmbeddingBase) and rotary.is_neox_style and rotary.rotary_dim == rotary.head_size == heads.head_size
    if not whole or rotary.cos_sin_cache.dim() != 2 or rotary.cos_sin_cache.shape[1] != heads.head_size:
        raise UnsupportedError("turns its heads in another way than by whole halves")
    weight = decoder.norm.weight
    angles = rotary.cos_sin_cache.to(weight.device, weight.dtype).contiguous()
    layers = tuple(_layer(layer) for layer in decoder.layers)
    return Layers(layers, angles, Products(heads.multiprocessors, chained), _head(model, eight=layers[0].eight))


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    named = all(isinstance(norm, RMSNorm) for norm in norms)
    return Layer(
        before_attention=_norm(layer.input_layernorm),
        qkv=_matrix(attention.qkv_proj),
        norms=(_norm(norms[0]).weight, _norm(norms[1]).weight) if named else None,
        head_eps=_norm(norms[0]).eps if named else 0.0,
        attention=attention.attn,
        output=_matrix(attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=_matrix(mlp.gate_up_proj),
        down=_matrix(mlp.down_proj),
    )


def _head(model: Any, *, eight: bool) -> Head | None:
    """The head, in 8 bits if the layers are. The model's own stays as it was saved: it may be the embedding too."""
    processor, layer = model.logits_processor, model.lm_head
    weight = layer.weight.data
    plain = processor.scale == 1.0 and processor.soft_cap is None and processor.head_dtype in (None, weight.dtype)
    unquantized = type(layer.quant_method) in (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    if not (plain and unquantized) or getattr(layer, "bias", None) is not None:
        return None
    matrix = Matrix(weight)
    if not matrix.supported:
        return None
    if eight:
        # Into one tensor a piece at a time: a head is larger than what memory there is to spare.
        quantized, scales = torch.empty_like(weight, dtype=EIGHT_BITS), weight.new_empty(len(weight), dtype=torch.float32)
        for piece, into, scale in zip(*(tensor.split(_HEAD_ROWS) for tensor in (weight, quantized, scales)), strict=True):
            made, factors = eight_bits(piece)
            into.copy_(made)
            scale.copy_(factors.flatten())
        matrix = Matrix(quantized, None, scales)
    return Head(matrix, processor.org_vocab_size)


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight.data, norm.variance_epsilon)


def _matrix(linear: LinearBase) -> Matrix:
    if type(linear.quant_method) not in (UnquantizedLinearMethod, EightBitLinear):
        raise UnsupportedError(f"has quantized weights ({type(linear.quant_method).__name__})")
    bias = linear.bias
    scales = linear.weight_scale if isinstance(linear.quant_method, EightBitLinear) else None
    matrix = Matrix(linear.weight.data, None if bias is None else bias.data, None if scales is None else scales.data.flatten())
    if not matrix.supported:
        raise UnsupportedError(f"has weights of {tuple(matrix.weight.shape)}, whose depth is no multiple of 16")
    return matrix
