"""A plan and records of steps, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minedraft_core.bench.plan import Plan, arms_of
from minedraft_core.cores import Cores
from minedraft_core.types import Mode, StepRecord

CORES = Cores((0, 1), (2,))


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "target": "target",
        "draft": "draft",
        "num_tokens": 4,
        "arms": arms_of(["off", "parallel"], CORES),
        "concurrency": (1, 8),
        "max_tokens": 64,
        "repeats": 3,
        "warmup": 1,
        "rounds": 1,
        "acceptance": None,
    }
    return Plan(**{**values, **changes})


START = 1_000_000


def step(
    number: int,
    start_ms: float,
    end_ms: float,
    *,
    running: int,
    generated: int = 1,
    prompt: bool = False,
    drafts: Sequence[tuple[int, int]] = (),
    gap_ms: float | None = None,
    wait_ms: float | None = None,
    mode: Mode = Mode.SEQUENTIAL,
) -> StepRecord:
    parallel = mode is Mode.PARALLEL
    return StepRecord(
        step=number,
        start_us=START + round(start_ms * 1000),
        end_us=START + round(end_ms * 1000),
        mode=mode,
        side=number % 2 if parallel else 0,
        is_prompt_run=prompt,
        is_parallelised=parallel,
        batched_requests=(running + 1) // 2 if parallel and not prompt else running,
        preempted_requests=0,
        batched_token_num=running,
        proposed_len=sum(drafted for drafted, _ in drafts),
        verify_len=sum(drafted for drafted, _ in drafts),
        accepted_num=sum(accepted for _, accepted in drafts),
        generated_num=generated,
        measured_draft_time=0.0,
        measured_target_time=(end_ms - start_ms) / 1000,
        measured_overhead_time=0.0005,
        gap_us=None if gap_ms is None else round(gap_ms * 1000),
        num_speculative_tokens=4,
        side_requests=(running - running // 2, running // 2) if parallel else (running, 0),
        drafter_wait_us=None if wait_ms is None else round(wait_ms * 1000),
        drafts=list(drafts),
        dropped={},
    )
