"""Carries out a plan: one engine after the other, each with all its runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from minedraft_core.bench.plan import Arm, Plan
from minedraft_core.bench.prompts import deal
from minedraft_core.bench.statistics import Figures, Run, steady_state, summarise
from minedraft_core.config import ConfigError, DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.types import Mode, Record, Span


class Engine(Protocol):
    """An engine that runs, with nobody else asking it."""

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of the prompts, as a user's turn where the tokenizer has a chat template."""
        ...

    def random_prompts(self, count: int, length: int) -> list[list[int]]:
        """Random token ids, the same on every call."""
        ...

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[list[int]], Span]:
        """Exactly `max_tokens` greedy tokens for each prompt, all started together; the time from the first request to the last token."""
        ...

    def take_records(self, num_tokens: int) -> list[Record]:
        """The records since the last call, once their passes have delivered so many tokens."""
        ...


SHARED_DEVICE = 0
"""The device of the target's first rank, which drives the drafter."""

Start = Callable[[Arm, PipelineConfig], AbstractContextManager[Engine]]
"""Starts an arm's engine."""

Tell = Callable[[str], None]
"""Takes a line on what is being done."""

Found = dict[tuple[Arm, int], Figures]
"""Figures by arm and concurrency."""


def run_benchmark(
    plan: Plan, texts: Sequence[str], start: Start, recordings: Path, tell: Tell, keep: Callable[[Found], None] = lambda _: None
) -> Found:
    """The figures of every arm at every concurrency.

    `recordings` is where a replay finds what plain decoding wrote. `keep` gets what there is after each engine, since a later one may not
    start. Raises ConfigError where a run is too short to have a steady state.
    """
    runs: defaultdict[tuple[Arm, int], list[Run]] = defaultdict(list)
    recorded: list[tuple[list[int], list[int]]] = []
    for turn in range(plan.rounds):
        for arm in plan.arms:
            tell(f"{arm.name}: starting the engine ({turn + 1} of {plan.rounds})")
            if arm.mode is not Mode.OFF and plan.acceptance is not None:
                recordings.write_bytes(msgspec.json.encode(recorded))
            with start(arm, pipeline_of(plan, arm, recordings)) as engine:
                prompts = _prompts(plan, engine, texts)
                for concurrency in plan.concurrency:
                    for index in range(plan.warmup + plan.repeats):
                        tell(f"{arm.name}: {concurrency} requests, run {index + 1} of {plan.warmup + plan.repeats}")
                        chosen = deal(prompts, concurrency, index)
                        outputs, run = _run(engine, chosen, plan.max_tokens)
                        if index >= plan.warmup:
                            runs[arm, concurrency].append(run)
                        if arm.mode is Mode.OFF:
                            recorded += zip(chosen, outputs, strict=True)
            keep({key: summarise(found) for key, found in runs.items()})
    return {key: summarise(found) for key, found in runs.items()}


def pipeline_of(plan: Plan, arm: Arm, recordings: Path) -> PipelineConfig:
    """The configuration of one arm's engine."""
    if arm.mode is Mode.OFF:
        return PipelineConfig(target_cores=arm.cores.target)
    device = SHARED_DEVICE if arm.shared else None
    drafter = DrafterConfig(
        cores=arm.cores.drafter,
        device=device,
        compiled=plan.compiled_drafter,
        fused=plan.drafter_fused,
        weights=plan.drafter_weights,
        synthetic_acceptance_length=plan.acceptance_length,
    )
    if plan.acceptance is not None:
        drafter = DrafterConfig(cores=arm.cores.drafter, replay=str(recordings), replay_acceptance=plan.acceptance)
    speculative = MineDraftConfig(
        method=plan.method,
        model=plan.draft,
        num_speculative_tokens=plan.num_tokens,
        num_speculative_tokens_per_batch_size=plan.per_batch_size if arm.by_batch else None,
        is_parallel=arm.mode is not Mode.SEQUENTIAL,
        force_pearl=arm.mode is Mode.PEARL,
        tetris=arm.tetris,
        tetris_capacity=plan.tetris_capacity,
        tetris_extra_proposals=plan.tetris_extra,
    )
    return PipelineConfig(speculative=speculative, drafter=drafter, target_cores=arm.cores.target)


def _prompts(plan: Plan, engine: Engine, texts: Sequence[str]) -> list[list[int]]:
    if plan.prompt_tokens is None:
        return engine.tokenize(texts)
    return engine.random_prompts(max(plan.concurrency) * (plan.warmup + plan.repeats), plan.prompt_tokens)


def _run(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[list[int]], Run]:
    outputs, span = engine.generate(prompts, max_tokens)
    total = len(prompts) * max_tokens
    steady = steady_state(engine.take_records(total), len(prompts))
    if steady is None:
        raise ConfigError(
            f"{len(prompts)} requests of {max_tokens} tokens had no steady state: raise --max-tokens, or the KV cache where it is full"
        )
    return outputs, Run(steady, total / (span.duration_us * 1e-6))
