"""Fused layers with weights against transformers, in Triton's interpreter on CPU: `TRITON_INTERPRET=1 python -m tests.gpu.layer_numbers`.

vLLM builds and loads the models. Three requests write their KV from their first token on, in steps of two tokens and of one, as drafts do;
the states after the last layer have to be those of the whole text, in float32, with the weights as they are and in 8 bits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from minedraft_core.vllm.gpu.decode import DraftStep, Heads
from minedraft_core.vllm.gpu.layers import Layers, read_layers
from minedraft_core.vllm.gpu.products import Workspace
from minedraft_core.vllm.gpu.weights import EightBitLinear
from tests.gpu.alone import stand_alone

CPU = torch.device("cpu")
PAGE, COLUMNS, VOCAB = 16, 3, 80
LENGTHS = (3, 18, 6)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CASES: tuple[tuple[PretrainedConfig, tuple[bool, ...]], ...] = (
    (LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_theta=100.0, rms_norm_eps=1e-2), (True,)),
    (Qwen2Config(**SIZES), (False,)),
    (Qwen3Config(**SIZES, head_dim=32), (False, True)),
)


def vllm_config(folder: Path) -> VllmConfig:
    return AsyncEngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 20
    ).create_engine_config()


def load(config: VllmConfig, reference: nn.Module, *, eight: bool) -> Any:
    """vLLM's model with the weights of the reference, which becomes one of the weights in 8 bits if these are."""
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        model = initialize_model(config)
    model.load_weights(reference.state_dict().items())
    if not eight:
        return model
    for layer in model.modules():
        if isinstance(layer, LinearBase):
            layer.quant_method = EightBitLinear()
            layer.quant_method.process_weights_after_loading(layer)
    for layer, of in zip(model.model.layers, reference.model.layers, strict=True):
        for joined, parts in (
            (layer.self_attn.qkv_proj, (of.self_attn.q_proj, of.self_attn.k_proj, of.self_attn.v_proj)),
            (layer.self_attn.o_proj, (of.self_attn.o_proj,)),
            (layer.mlp.gate_up_proj, (of.mlp.gate_proj, of.mlp.up_proj)),
            (layer.mlp.down_proj, (of.mlp.down_proj,)),
        ):
            widened = joined.weight.float() * joined.weight_scale
            for part, weight in zip(parts, widened.split([part.out_features for part in parts]), strict=True):
                part.weight.data = weight
    return model


def states_of(model: Any, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The states after the last layer's norm, by request [tokens, hidden], with the fused layers; their logits are checked."""
    attention = model.model.layers[0].self_attn
    heads = Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim, 4)
    layers = read_layers(model, heads, chained=False)
    scratch, workspace = heads.scratch(len(texts), CPU), layers.workspace()
    for layer in layers.layers:
        cache = torch.zeros(1 + len(texts) * COLUMNS, PAGE, heads.num_kv_heads, 2 * heads.head_size)
        layer.attention.kv_cache = cache.transpose(1, 2)
        layer.attention.impl = SimpleNamespace(scale=heads.head_size**-0.5)
    table = 1 + torch.arange(len(texts) * COLUMNS, dtype=torch.int32).view(len(texts), COLUMNS).flip(0)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    done = 0
    for count in [2, 1, 2, *[1] * (max(LENGTHS) - 5)]:
        positions = torch.arange(done, done + count).repeat(len(texts), 1)
        inside = positions < torch.tensor([[len(text)] for text in texts])
        # A request that has ended goes on as padding does: at a place of its own that is never written.
        ids = torch.stack(
            [text[done : done + count] if len(text) >= done + count else torch.zeros(count, dtype=torch.long) for text in texts]
        )
        slots = torch.where(inside, table.gather(1, positions // PAGE) * PAGE + positions % PAGE, -1)
        seq_lens = torch.full((len(texts),), done + count, dtype=torch.int32)
        step = DraftStep(heads, scratch, table, seq_lens, slots.flatten().long())
        states = layers.run(model.embed_input_ids(ids.flatten()).clone(), positions.flatten(), step, workspace)
        states = model.model.norm.forward_native(states)
        if not done:
            _check_head(layers, states, workspace)
        states = states.view(len(texts), count, -1)
        for request, text in enumerate(texts):
            if len(text) >= done + count:
                found[request] += states[request]
        done += count
    return [torch.stack(states) for states in found]


def _check_head(layers: Layers, states: torch.Tensor, workspace: Workspace) -> None:
    head = layers.head
    assert head is not None
    widened = head.matrix.weight.float() * (1 if head.matrix.scales is None else head.matrix.scales[:, None])
    logits = head.logits(layers.products, states, workspace)
    assert logits.shape[1] == VOCAB
    torch.testing.assert_close(logits, states @ widened[:VOCAB].t(), rtol=1e-4, atol=1e-4)


def main() -> None:
    torch.manual_seed(0)
    texts = [torch.randint(VOCAB, (length,)) for length in LENGTHS]
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        started = False
        for index, (kind, weights) in enumerate(CASES):
            reference = AutoModelForCausalLM.from_config(kind).float().eval()
            for weight in reference.parameters():
                weight.normal_(0, 0.3)
            folder = Path(name) / str(index)
            reference.save_pretrained(folder)
            config = vllm_config(folder)
            if not started:
                stand_alone(config, folder)
                started = True
            for eight in weights:
                found = states_of(load(vllm_config(folder), reference, eight=eight), texts)
                for text, states in zip(texts, found, strict=True):
                    expected = reference.model(text[None]).last_hidden_state[0, : len(states)]
                    torch.testing.assert_close(states, expected, rtol=2e-3, atol=2e-3)


if __name__ == "__main__":
    main()
