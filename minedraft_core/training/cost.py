"""What a draft token costs next to a step of the target: one request, one CPU core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minedraft_core.training.model import Drafter
from minedraft_core.training.writer import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Cost:
    """Median milliseconds of one token at batch 1 on one core, after `context` tokens."""

    context: int
    target_ms: float
    draft_ms: float

    @property
    def ratio(self) -> float:
        """Draft token over target step."""
        return self.draft_ms / self.target_ms


def _timed(step: Callable[[Tensor], Any], head: Tensor, token: Tensor) -> float:
    began = time.perf_counter()
    (step(token).last_hidden_state[:, -1] @ head.T).argmax(-1)
    return (time.perf_counter() - began) * 1e3


@torch.inference_mode()
def measure(target: PreTrainedModel, drafter: Drafter, *, context: int = 256, tokens: int = 64) -> Cost:
    """Time both models in turn, so that a disturbance of the machine meets both. Both must be on the CPU; one thread is used."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    heads = target.get_output_embeddings().weight, drafter.model.get_output_embeddings().weight[drafter.token_ids]
    token = torch.ones(1, dtype=torch.long)
    length = context + tokens
    spent: tuple[list[float], list[float]] = ([], [])
    try:
        with Decoder(target.base_model, length) as verify, Decoder(drafter.model.model, length) as draft:
            for _ in range(context):
                verify(token), draft(token)
            for _ in range(tokens):
                for times, step, head in zip(spent, (verify, draft), heads, strict=True):
                    times.append(_timed(step, head, token))
    finally:
        torch.set_num_threads(threads)
    return Cost(context, *map(statistics.median, spent))
