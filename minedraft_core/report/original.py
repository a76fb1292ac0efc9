"""Traces of the original MineDraft plugin: a bundle of one run a line, what it was measured with in the file's name.

Requests have no time of their first token there; it is the end of the pass that ran their prompt. Steps name their requests.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from minedraft_core.config import ConfigError
from minedraft_core.report.trace import Request, Run, Step, Trace
from minedraft_core.trace import RunHeader

_NAME = re.compile(
    r"input=\d+_(?P<dataset>.+)_(?P<target>[^_]+)_(?P<draft>[^_]+)_(?P<batch>\d+)_(?P<tetris>True|False)_parallel=(?P<parallel>True|False|pearl)"
    r"_k=(?P<k>\d+)_t=(?P<extra>\d+)_n=(?P<n>\d+)(?:_c=\d+)?(?:_warmup=(?P<warmup>\d+)_runs=\d+)?"
)
_MODES = {"True": "parallel", "False": "sequential", "pearl": "pearl"}
_TARGET_GPUS = 4
_NAMELESS = "its name does not say what it was measured with: mode and load are taken from its steps, no run counts as warm-up"
_BY_BATCH = "TTFT and time in passes are taken from the passes that name each request"


class _Entry(msgspec.Struct):
    """A step or a request; a field that was not set is left out of the file."""

    type: str
    tid: str | None = None
    start_us: float | None = None
    end_us: float | None = None
    is_prompt_run: bool = False
    is_parallelised: bool | None = None
    batched_requests: list[str] = []
    preempted_requests: list[str] = []
    batched_token_num: int | None = None
    proposed_len: int | None = None
    verify_len: int | None = None
    accepted_num: int | None = None
    generated_num: int | None = None
    measured_draft_time: float | None = None
    measured_target_time: float | None = None
    measured_overhead_time: float | None = None
    prompt_len: int | None = None
    gen_len: int | None = None


class _Bundle(msgspec.Struct):
    traces: list[_Entry]
    metadata: dict[str, Any] | None = None


def is_bundle(line: bytes) -> bool:
    """Whether a line is a bundle."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(found, dict) and "traces" in found


def read_bundles(path: Path, lines: Sequence[bytes]) -> Trace:
    """The trace of a file of bundles. Raises ConfigError for a line that is none."""
    runs = []
    unfinished, cut = 0, False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            bundle = msgspec.json.decode(line, type=_Bundle, strict=False)
        except (msgspec.DecodeError, RecursionError) as error:
            if number == len(lines) and not line.rstrip().endswith(b"}"):
                cut = True
                break
            raise ConfigError(f"line {number} of {path} is no bundle of traces: {error}") from None
        if any(entry.start_us is not None and entry.end_us is not None and entry.end_us < entry.start_us for entry in bundle.traces):
            raise ConfigError(f"line {number} of {path} holds a step or request that ends before it begins")
        run, left_out = _run_of(bundle.traces)
        runs.append(run)
        unfinished += left_out
    header, warmup, remarks = _header_of(path, runs)
    if cut:
        remarks.append("its last run is cut off and left out")
    if unfinished:
        remarks.append(f"{unfinished} steps and requests have no end and are left out")
    return Trace(path.stem, header, tuple(runs[warmup:]), (*remarks, _BY_BATCH))


def _run_of(entries: Sequence[_Entry]) -> tuple[Run, int]:
    ended = [entry for entry in entries if entry.start_us is not None and entry.end_us is not None]
    steps = tuple(sorted((_step(entry) for entry in ended if entry.type == "Step"), key=lambda step: step.end_us))
    first: dict[str, int] = {}
    inside: defaultdict[str, int] = defaultdict(int)
    for step in steps:
        for request_id in step.request_ids or ():
            inside[request_id] += step.end_us - step.start_us
            if step.is_prompt_run:
                first[request_id] = step.end_us
    requests = tuple(_request(entry, first, inside) for entry in ended if entry.type == "Request")
    return Run(steps, requests), len(entries) - len(steps) - len(requests)


def _step(entry: _Entry) -> Step:
    return Step(
        start_us=round(entry.start_us or 0),
        end_us=round(entry.end_us or 0),
        is_prompt_run=entry.is_prompt_run,
        is_parallelised=entry.is_parallelised,
        batched_requests=len(entry.batched_requests) or None,
        preempted_requests=len(entry.preempted_requests),
        batched_token_num=entry.batched_token_num,
        proposed_len=entry.proposed_len,
        verify_len=entry.verify_len,
        accepted_num=entry.accepted_num,
        generated_num=entry.generated_num,
        measured_draft_time=entry.measured_draft_time,
        measured_target_time=entry.measured_target_time,
        measured_overhead_time=entry.measured_overhead_time,
        request_ids=entry.batched_requests or None,
    )


def _request(entry: _Entry, first: dict[str, int], inside: dict[str, int]) -> Request:
    return Request(
        start_us=round(entry.start_us or 0),
        end_us=round(entry.end_us or 0),
        first_token_us=first.get(entry.tid or ""),
        prompt_len=entry.prompt_len,
        gen_len=entry.gen_len,
        in_passes_us=inside.get(entry.tid or ""),
    )


def _header_of(path: Path, runs: Sequence[Run]) -> tuple[RunHeader, int, list[str]]:
    """The head, the number of runs to warm up, and what is to be said about them."""
    match = _NAME.fullmatch(path.stem)
    if match is None:
        parallel = any(step.is_parallelised for run in runs for step in run.steps)
        most = max((step.batched_requests or 0 for run in runs for step in run.steps), default=0)
        header = RunHeader(arm="parallel" if parallel else "sequential", target="unknown", load=most * (2 if parallel else 1))
        return (
            header,
            0,
            [_NAMELESS],
        )
    mode = _MODES[match["parallel"]]
    # Its parallel mode runs a second batch beside the first.
    load = int(match["batch"]) * (2 if mode == "parallel" else 1)
    header = RunHeader(
        arm=f"{mode}-tetris" if match["tetris"] == "True" else mode,
        target=match["target"],
        load=load,
        draft=match["draft"],
        k=int(match["k"]),
        extra=int(match["extra"]),
        n=int(match["n"]),
        dataset=match["dataset"],
        gpus=_TARGET_GPUS + (mode != "sequential"),
        published=True,
    )
    warmup = int(match["warmup"] or 0)
    return header, warmup, [f"GPUs as published: {_TARGET_GPUS} of the target, one more of the drafter in parallel and pearl"]
