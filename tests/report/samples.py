"""Traces written by hand: one run with a prompt pass and three passes that verify, of two requests that arrive together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from minedraft_core.trace import RunHeader, trace_lines
from minedraft_core.types import DraftRecord, Mode, RequestRecord, StepRecord

MS = 1000


def header(**changes: Any) -> RunHeader:
    values: dict[str, Any] = {
        "arm": "sequential",
        "target": "maker/target",
        "draft": "maker/draft",
        "k": 2,
        "load": 2,
        "dataset": "questions",
    }
    return RunHeader(**{**values, **changes})


def step(
    number: int, start: float, end: float, *, prompt: bool = False, gap: float | None = None, mode: Mode = Mode.SEQUENTIAL
) -> StepRecord:
    """Times are milliseconds. A pass over two requests: one draft is accepted whole, of the other one its first token."""
    drafts = [] if prompt else [(2, 2), (2, 1)]
    return StepRecord(
        step=number,
        start_us=round(start * MS),
        end_us=round(end * MS),
        mode=mode,
        side=number % 2 if mode is Mode.PARALLEL else 0,
        is_prompt_run=prompt,
        is_parallelised=mode is Mode.PARALLEL,
        batched_requests=2,
        preempted_requests=0,
        batched_token_num=6,
        proposed_len=0 if prompt else 4,
        verify_len=0 if prompt else 4,
        accepted_num=0 if prompt else 3,
        generated_num=2 if prompt else 5,
        measured_draft_time=0.0 if prompt else 0.004,
        measured_target_time=(end - start) / MS,
        measured_overhead_time=0.001,
        gap_us=None if gap is None else round(gap * MS),
        num_speculative_tokens=2,
        drafter_wait_us=None if prompt else 500,
        drafts=drafts,
        side_requests=(2, 0),
        dropped={},
    )


def run_lines(offset: float = 0.0, mode: Mode = Mode.SEQUENTIAL, speed: float = 1.0) -> bytes:
    """One run of 17 tokens that begins at `offset` ms and takes 100 ms / speed: a prompt pass of 40, then passes of 16 after gaps of 4."""
    records = [
        step(1, offset, offset + 40 / speed, prompt=True, mode=mode),
        *(
            step(
                number,
                offset + (40 + 20 * (number - 2) + 4) / speed,
                offset + (40 + 20 * (number - 1)) / speed,
                gap=4 / speed,
                mode=mode,
            )
            for number in (2, 3, 4)
        ),
        *(
            DraftRecord(
                round=number,
                start_us=round((offset + (40 + 20 * number) / speed) * MS),
                end_us=round((offset + (48 + 20 * number) / speed) * MS),
                hidden_us=round(4 * MS / speed),
                batched_requests=2,
                drafted_per_position=[2, 2],
            )
            for number in (0, 1, 2)
        ),
        RequestRecord(
            "a",
            round(offset * MS),
            round((offset + 40 / speed) * MS),
            round((offset + 100 / speed) * MS),
            10,
            9,
            "length",
            round(offset * MS),
        ),
        RequestRecord(
            "b",
            round(offset * MS),
            round((offset + 60 / speed) * MS),
            round((offset + 100 / speed) * MS),
            12,
            8,
            "length",
            round((offset + 10 / speed) * MS),
        ),
    ]
    return trace_lines(records)


def write(path: Path, head: RunHeader | None, *runs: bytes) -> Path:
    """A trace with the head before each run."""
    with path.open("wb") as file:
        for number, lines in enumerate(runs):
            if head is not None:
                file.write(msgspec.json.encode(msgspec.structs.replace(head, repeat=number)) + b"\n")
            file.write(lines)
        if not runs and head is not None:
            file.write(msgspec.json.encode(head) + b"\n")
    return path


def original(path: Path, *, bundles: int = 2) -> Path:
    """A trace as the original plugin wrote it: a prompt pass of two requests until 40 ms, then two passes, the second one of a alone."""
    entries = [
        {"tid": "Request:0", "type": "Request", "start_us": 0.0, "end_us": 100_000.0, "prompt_len": 10, "gen_len": 6},
        {"tid": "Request:1", "type": "Request", "start_us": 0.0, "end_us": 70_000.0, "prompt_len": 10, "gen_len": 4},
        {"tid": "Request:2", "type": "Request", "start_us": 0.0},
        {
            "tid": "Step:0",
            "type": "Step",
            "start_us": 0.0,
            "end_us": 40_000.0,
            "is_prompt_run": True,
            "batched_requests": ["Request:0", "Request:1"],
        },
        {
            "tid": "Step:1",
            "type": "Step",
            "start_us": 44_000.5,
            "end_us": 70_000.25,
            "is_prompt_run": False,
            "is_parallelised": True,
            "batched_requests": ["Request:0", "Request:1"],
            "proposed_len": 8,
            "verify_len": 6,
            "accepted_num": 3,
            "generated_num": 5,
            "measured_draft_time": 0.01,
            "measured_target_time": 0.02,
            "measured_overhead_time": 0.002,
            "preempted_requests": ["Request:2"],
        },
        {
            "tid": "Step:2",
            "type": "Step",
            "start_us": 75_000.0,
            "end_us": 100_000.0,
            "is_prompt_run": False,
            "is_parallelised": True,
            "batched_requests": ["Request:0"],
            "proposed_len": 4,
            "verify_len": 4,
            "accepted_num": 2,
            "generated_num": 3,
        },
    ]
    line = msgspec.json.encode({"metadata": {}, "traces": entries})
    path.write_bytes(b"\n".join([line] * bundles) + b"\n")
    return path
