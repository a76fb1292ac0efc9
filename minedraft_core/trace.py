"""The trace file: one JSON object a line, a step of the target, an answer of the drafter, a finished request, or the head of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from minedraft_core.feed import FeedMessage
from minedraft_core.types import Count, DraftRecord, LookaheadRecord, Record, RequestRecord, StepRecord, TraceStep

_encoder = msgspec.json.Encoder()


class RunHeader(msgspec.Struct, frozen=True, tag="run", kw_only=True):
    """What the lines up to the next header were measured with; an experiment writes one before each of its runs.

    `arm` is a mode, with TETRIS `MODE-tetris`. `load` is the number of requests that run at once, `k` the draft tokens a step, `extra`
    those beyond k that TETRIS chooses from, `n` the samples of a prompt, `gpus` the CUDA devices in use, 0 on CPU. `acceptance` says how
    drafts were judged where that was not by the target alone. `published` marks the loads of the published experiment. `refused` is the
    reason why the arm cannot be run; no lines follow then. `settings` and `provenance` are for the reader.
    """

    arm: str
    target: str
    load: Count
    draft: str | None = None
    k: Count = 0
    extra: Count = 0
    n: Count = 1
    dataset: str | None = None
    gpus: Count = 0
    acceptance: str | None = None
    published: bool = False
    repeat: int = 0
    experiment: str | None = None
    variant: str | None = None
    refused: str | None = None
    settings: dict[str, Any] = {}
    provenance: dict[str, Any] = {}


def trace_lines(records: Iterable[Record]) -> bytes:
    """The lines of these records, each ended; records that have no place in a trace leave none."""
    lines: list[TraceStep | RequestRecord | DraftRecord | LookaheadRecord] = []
    for record in records:
        if isinstance(record, StepRecord):
            lines.append(msgspec.convert(record, TraceStep, from_attributes=True))
        elif isinstance(record, RequestRecord | DraftRecord | LookaheadRecord):
            lines.append(record)
    return _encoder.encode_lines(lines)


class TraceWriter:
    """A feed sink that appends lines to a file; runs on the feed's thread, so the engine loop never waits for the disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                # A writer that was killed left half a line, which must not swallow the next one.
                self._file.write(b"\n")

    def __call__(self, message: FeedMessage) -> None:
        """Write the lines of the message's records."""
        if lines := trace_lines(message.records):
            self._file.write(lines)
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
