"""In bfloat16 the shape of a batch moves the last bit of a logit. Where that changes a token, the two candidates were tied."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from minedraft_core.embedded import prepare
from tests.engine.harness import Job, engine, greedy
from tests.engine.workload import prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
LENGTH = 32


def bfloat16_step(value: float) -> float:
    """Distance between neighbouring bfloat16 numbers around `value` (8 bits of significand)."""
    return float(2.0 ** (math.floor(math.log2(abs(value))) - 7))


def delivered(mode: str) -> list[tuple[list[int], list[int]]]:
    """Prompt and output ids of every prompt, 16 at a time, in bfloat16."""
    with engine(mode, dtype="bfloat16") as started:
        outputs = started.generate([Job(text, greedy(LENGTH)) for text in prompts()], concurrency=16)
    return [(list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)) for output in outputs if output is not None]


@torch.inference_mode()
def gap_in_steps(model: PreTrainedModel, context: list[int], one: int, other: int) -> float:
    """The float32 gap between two candidates for the next token, in bfloat16 steps of the larger logit."""
    logits = model(torch.tensor([context])).logits[0, -1]
    return abs(float(logits[one] - logits[other])) / bfloat16_step(max(float(logits[one]), float(logits[other])))


def test_differences_in_bfloat16_are_ties() -> None:
    alone = delivered("off")
    model = AutoModelForCausalLM.from_pretrained(prepare(progress=False).target, dtype=torch.float32).eval()
    assert len(alone) >= 60
    for mode in ("sequential", "parallel"):
        gaps = []
        for (prompt, expected), (_, got) in zip(alone, delivered(mode), strict=True):
            first = next((index for index, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b), None)
            if first is not None:
                gaps.append(gap_in_steps(model, prompt + expected[:first], expected[first], got[first]))
        assert max(gaps, default=0.0) <= 1.0, (mode, gaps)
