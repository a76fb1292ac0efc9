"""The target's embedding and output head, which a head without its own drafts with: brought to the drafter's device once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.eagle.utils import get_target_lm_head

from minedraft_core.config import ConfigError


@dataclass(frozen=True)
class TargetEnds:
    """Both ends of the target, whole whatever its tensor parallelism, [padded vocabulary, hidden]. None where vLLM cannot share them.

    `width` is the number of columns of the hidden states that travel.
    """

    embedding: torch.Tensor | None
    head: torch.Tensor | None
    width: int


def target_ends(target: nn.Module, config: VllmConfig, drafter: torch.device | None) -> TargetEnds | None:
    """Gather the ends on the drafter's device. Every rank of the target has to call it; None where `drafter` is none.

    On the target's own device an end that is not spread over ranks is shared, not copied. Raises ConfigError for a target that has no
    embedding as vLLM's decoders have it.
    """
    language: Any = target.get_language_model() if hasattr(target, "get_language_model") else target
    embedding = getattr(getattr(language, "model", None), "embed_tokens", None)
    if embedding is None:
        raise ConfigError(f"{type(target).__name__} does not show its embedding, which EAGLE needs: serve it with a draft model")
    head = get_target_lm_head(target, language)
    tied = head is None or getattr(head, "weight", None) is getattr(embedding, "weight", None)
    first = _whole(embedding, drafter)
    last = first if tied else _whole(head, drafter)
    return None if drafter is None else TargetEnds(first, last, _width(target, config))


def _whole(end: nn.Module, drafter: torch.device | None) -> torch.Tensor | None:
    if not isinstance(end, VocabParallelEmbedding) or not isinstance(end.quant_method, UnquantizedEmbeddingMethod):
        return None
    weight = get_tp_group().gather(end.weight.data, dst=0, dim=0)
    return None if drafter is None or weight is None else weight.to(drafter)


def _width(target: Any, config: VllmConfig) -> int:
    hidden = config.model_config.get_hidden_size()
    speculative = config.speculative_config
    assert speculative is not None
    if speculative.method != "eagle3":
        return hidden
    layers = get_eagle3_aux_layers_from_config(speculative) or target.get_eagle3_default_aux_hidden_state_layers()
    return hidden * len(set(layers))
