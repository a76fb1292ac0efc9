"""A draft model whose draft steps run in kernels of their own: five a layer, where vLLM's take three times as many."""

from __future__ import annotations

import gc
from typing import Any, Literal

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from minedraft_core.config import ConfigError, DrafterConfig
from minedraft_core.vllm.gpu.decode import DraftStep
from minedraft_core.vllm.gpu.layers import UnsupportedError, read_layers
from minedraft_core.vllm.gpu.model import DraftModel, draft_config
from minedraft_core.vllm.gpu.weights import EightBits

# Programmatic dependent launch came with Hopper, the only GPUs that the kernels were measured on.
_CHAINING_CAPABILITY = (9, 0)
_EIGHT_BIT_CAPABILITY = divmod(EightBits.get_min_capability(), 10)


class FusedModel(DraftModel):
    """A causal LM on one device. Prompts, and steps of more tokens than these kernels are faster for, run as vLLM runs them."""

    def __init__(self, config: VllmConfig, device: torch.device, group: GroupCoordinator | None) -> None:
        """As the base's; raises ConfigError for models that the kernels cannot run."""
        capability = torch.cuda.get_device_capability(device)
        if isinstance(config.quant_config, EightBits) and capability < _EIGHT_BIT_CAPABILITY:
            raise ConfigError(f"--drafter-weights fp8 needs a GPU of compute capability 8.9 or more, not {capability}; remove the flag")
        super().__init__(config, device, group)
        chained = capability >= _CHAINING_CAPABILITY
        assert self._heads is not None
        try:
            self._stack = read_layers(self._model, self._heads, chained=chained)
        except UnsupportedError as reason:
            raise ConfigError(f"--drafter-fused layers cannot run the draft model {self.name}: it {reason}; use attention") from reason

    def bind_cache(self, num_blocks: int, block_size: int, max_num_reqs: int) -> None:
        """As the base's."""
        super().bind_cache(num_blocks, block_size, max_num_reqs)
        self._workspace = self._stack.workspace()

    def _forward(self, inputs: dict[str, torch.Tensor], metadata: DraftStep | FlashAttentionMetadata) -> Any:
        if not isinstance(metadata, DraftStep) or len(metadata.slots) > self._stack.most_rows:
            return super()._forward(inputs, metadata)
        states = self._stack.run(self._model.embed_input_ids(inputs["input_ids"]), inputs["positions"], metadata, self._workspace)
        return self._model.model.norm(states)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the base's."""
        if self._stack.head is None or hidden.shape[0] > self._stack.most_rows:
            return super().logits(hidden)
        return self._stack.head.logits(self._stack.products, hidden, self._workspace)

    def describe(self) -> str:
        """As the base's."""
        return f"draft steps of up to {self._stack.most_rows} tokens run in fused layers"


def load_draft_model(config: VllmConfig, device: torch.device, drafter: DrafterConfig, group: GroupCoordinator | None) -> DraftModel:
    """The draft model in the kernels that `drafter` names, with `device` current.

    `config` is the target's. Left to choose (`auto`), it takes fused layers where weights in 8 bits need them, and on Hopper GPUs where the
    draft model can be run by them. Raises ConfigError for a model that cannot be run here.
    """

    def load(fused: Literal["none", "attention", "layers"]) -> DraftModel:
        kind = FusedModel if fused == "layers" else DraftModel
        return kind(draft_config(config, device, drafter.model_copy(update={"fused": fused})), device, group)

    if drafter.fused != "auto":
        return load(drafter.fused)
    if drafter.weights == "fp8":
        return load("layers")
    if drafter.compiled or torch.cuda.get_device_capability(device) != _CHAINING_CAPABILITY:
        return load("none")
    try:
        return load("layers")
    except ConfigError as reason:
        refusal = str(reason)
    # Its weights go before they are read again.
    gc.collect()
    torch.cuda.empty_cache()
    model = load("none")
    model.refusal = refusal
    return model
