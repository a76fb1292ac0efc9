"""The drafter's attention backend: our kernel for draft steps, FlashAttention for prompts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.registry import register_backend

from minedraft_core.vllm.gpu.decode import DraftStep, decode

NAME = "MINEDRAFT_DRAFTER"


class DraftAttention(FlashAttentionImpl):
    """One layer's attention. Writes the KV cache itself."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend into `output`, [tokens, heads, head], after writing the KV of the new tokens."""
        if isinstance(attn_metadata, DraftStep):
            decode(attn_metadata, query, key, value, kv_cache, output, self.scale)
            return output
        if attn_metadata is not None:
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)

    @property
    def plain(self) -> bool:
        """Whether the layer is causal attention to everything before, as the kernel computes it."""
        return self.sliding_window == (-1, -1) and not self.logits_soft_cap and self.alibi_slopes is None and self.sinks is None


@register_backend(NAME)
class DraftAttentionBackend(FlashAttentionBackend):
    """Chosen for the draft model alone; vLLM finds it by its name."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's registry."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[DraftAttention]:
        """The class of a layer's attention."""
        return DraftAttention
