"""The requests that every mode must answer alike."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

import minedraft_core.bench
from server.sampling import ServingParams
from tests.engine.harness import Engine, Job, greedy

TOKENS = 16
LONG_TOKENS = 80
LONG_PROMPTS = 6
CONCURRENCY = 16


@dataclass(frozen=True)
class Results:
    """Token ids of the plain prompts, of the first few continued further, and full outputs of the special requests by name."""

    plain: list[list[int]]
    long: list[list[int]]
    special: dict[str, list[Any]]


@cache
def prompts() -> list[str]:
    """First turns of Spec-Bench questions over all categories; at least 60."""
    lines = Path(minedraft_core.bench.__file__).with_name("prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0][:500] for line in lines]


def special_jobs() -> dict[str, Job]:
    """Requests that use what the API offers; each has one right answer, seeded sampling included."""
    texts = prompts()

    def params(**fields: Any) -> SamplingParams:
        return ServingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **fields})

    seeded = {"temperature": 0.9, "seed": 1234}
    choices: dict[str, tuple[str, SamplingParams]] = {
        "long prompt": ("The history of Rome began in its early days, and it went on. " * 30 + texts[0], params()),
        "one token": (texts[1], params(max_tokens=1)),
        "two tokens": (texts[2], params(max_tokens=2)),
        "stop string": (texts[3], params(stop=["\n", " the"], ignore_eos=False)),
        "stop kept": (texts[4], params(stop=[" of"], include_stop_str_in_output=True)),
        "stop token": (texts[5], params(stop_token_ids=[28, 30, 198])),
        "end of sequence": ("<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n", params(ignore_eos=False, max_tokens=60)),
        "logprobs": (texts[6], params(logprobs=3)),
        "prompt logprobs": (texts[7][:300], params(prompt_logprobs=1, max_tokens=8)),
        "penalties": (texts[8], params(presence_penalty=0.7, frequency_penalty=0.9, repetition_penalty=1.2)),
        "min_tokens": (texts[9], params(min_tokens=20, stop_token_ids=[28, 30, 198, 216], ignore_eos=False)),
        "bad words": (texts[10], params(bad_words=["the", "and"])),
        "logit_bias": (texts[11], params(logit_bias={28: -100.0, 260: 4.0})),
        "allowed": (texts[12], params(allowed_token_ids=list(range(200, 400)))),
        "regex": (texts[13], params(structured_outputs=StructuredOutputsParams(regex="[a-z]{3}( [a-z]{2,6}){4}"), ignore_eos=False)),
        "json": (
            texts[14],
            params(
                structured_outputs=StructuredOutputsParams(
                    json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
                ),
                ignore_eos=False,
            ),
        ),
        "seeded": (texts[15], params(**seeded)),
        "seeded top": (texts[16], params(**seeded, top_k=40, top_p=0.9)),
        "seeded min_p": (texts[17], params(**seeded, min_p=0.1)),
        "seeded bias": (texts[18], params(**seeded, logit_bias={28: 3.0}, logprobs=2)),
        "seeded penalties": (texts[19], params(**seeded, repetition_penalty=1.3)),
    }
    rng = random.Random(7)
    return {name: Job(text, sampling, delay=rng.random() * 2) for name, (text, sampling) in choices.items()}


def disturbances() -> list[Job]:
    """Requests without a right answer that come and go among the others: unseeded sampling, and clients that go away."""
    texts = prompts()
    return [
        Job(texts[20], SamplingParams(temperature=1.0, max_tokens=48, ignore_eos=True), delay=0.1),
        Job(texts[21], SamplingParams(temperature=1.0, top_p=0.8, max_tokens=48, ignore_eos=True), delay=0.7),
        Job(texts[22], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), delay=0.3, abort_after=5),
        Job(texts[23], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), delay=0.5, abort_after=9),
        Job(texts[24], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), delay=0.9, abort_after=1),
    ]


def run_workload(engine: Engine, texts: list[str]) -> Results:
    """Everything, at most 16 at once."""
    plain = engine.generate([Job(text, greedy(TOKENS)) for text in texts], CONCURRENCY)
    long = engine.generate([Job(text, greedy(LONG_TOKENS)) for text in texts[:LONG_PROMPTS]])
    jobs = special_jobs()
    special = engine.generate([*jobs.values(), *disturbances()])
    return Results(
        plain=[list(output.outputs[0].token_ids) for output in plain if output is not None],
        long=[list(output.outputs[0].token_ids) for output in long if output is not None],
        special={name: _comparable(output) for name, output in zip(jobs, special[: len(jobs)], strict=True)},
    )


def _comparable(output: Any) -> list[Any]:
    return [_choice(choice) for choice in output.outputs] + [_logprobs(output.prompt_logprobs)]


def _choice(choice: CompletionOutput) -> tuple[Any, ...]:
    return list(choice.token_ids), choice.text, choice.finish_reason, choice.stop_reason, _logprobs(choice.logprobs)


def _logprobs(positions: Any) -> Any:
    if positions is None:
        return None
    return [
        None if position is None else sorted((token, round(value.logprob, 2)) for token, value in position.items())
        for position in positions
    ]
