"""A draw of draft tokens, with its logits kept as vLLM's own speculators keep them."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample


def draw(
    logits: torch.Tensor,
    kept: torch.Tensor,
    slots: torch.Tensor,
    columns: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    use_fp64: bool,
) -> torch.Tensor:
    """Tokens int64 [n] drawn from logits [n, vocabulary], which go to `kept` [slots, columns, vocabulary] as they are before temperature.

    slots: int [n], the row of `kept`, temperature float32 [slots] and seeds int64 [slots]; negative for a row without a draw.
    columns: int64 [n], or one for all. positions: int64 [n], which key the noise.
    """
    return gumbel_sample(
        logits.to(kept.dtype),
        slots,
        temperature,
        seeds,
        positions,
        apply_temperature=True,
        is_drafting=True,
        logits_cache=kept,
        logits_cache_col=columns,
        use_fp64=use_fp64,
    )
