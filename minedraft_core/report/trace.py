"""Traces as the report sees them. Every field that a file may lack is None where it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from minedraft_core.config import MOST_DRAFTS
from minedraft_core.trace import RunHeader
from minedraft_core.types import Count

Drafts = Annotated[int, msgspec.Meta(ge=0, le=MOST_DRAFTS)]
"""Draft tokens of one request in a pass."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One pass of the target. `request_ids` are those of its batch, known in traces of the original plugin only. Times as in the trace."""

    start_us: int
    end_us: int
    mode: str | None = None
    side: int | None = None
    is_prompt_run: bool = False
    is_parallelised: bool | None = None
    batched_requests: Count | None = None
    preempted_requests: Count | None = None
    batched_token_num: Count | None = None
    proposed_len: Count | None = None
    verify_len: Count | None = None
    accepted_num: Count | None = None
    generated_num: Count | None = None
    measured_draft_time: float | None = None
    measured_target_time: float | None = None
    measured_overhead_time: float | None = None
    gap_us: int | None = None
    drafter_wait_us: int | None = None
    drafts: list[tuple[Drafts, Drafts]] | None = None
    request_ids: list[str] | None = None


class Request(msgspec.Struct, frozen=True, tag="request"):
    """One finished request. `in_passes_us` is the time of the passes that it was part of, known where steps name their requests."""

    start_us: int
    end_us: int
    first_token_us: int | None = None
    scheduled_us: int | None = None
    prompt_len: Count | None = None
    gen_len: Count | None = None
    finish_reason: str | None = None
    in_passes_us: int | None = None


class Drafted(msgspec.Struct, frozen=True, tag="drafted"):
    """One answer of the drafter."""

    start_us: int
    end_us: int
    hidden_us: int | None = None
    batched_requests: Count | None = None


class Ahead(msgspec.Struct, frozen=True, tag="ahead"):
    """Tokens drafted ahead while the target verified."""

    start_us: int
    end_us: int
    hidden_us: int | None = None
    hits: Count = 0
    misses: Count = 0


@dataclass(frozen=True)
class Run:
    """The lines of one measured run, each kind in the order of the file."""

    steps: tuple[Step, ...] = ()
    requests: tuple[Request, ...] = ()
    drafted: tuple[Drafted, ...] = ()
    ahead: tuple[Ahead, ...] = ()


@dataclass(frozen=True)
class Trace:
    """All runs of one arm, which `header` describes. `remarks` say what is not right with the file."""

    name: str
    header: RunHeader
    runs: tuple[Run, ...]
    remarks: tuple[str, ...] = ()
