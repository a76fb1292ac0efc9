"""The trace file: one JSON object a line, a step of the target or a finished request."""

from __future__ import annotations

from pathlib import Path

import msgspec

from minedraft_core.feed import FeedMessage
from minedraft_core.types import RequestRecord, StepRecord, TraceStep


class TraceWriter:
    """A feed sink that appends lines to a file; runs on the feed's thread, so the engine loop never waits for the disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._encoder = msgspec.json.Encoder()

    def __call__(self, message: FeedMessage) -> None:
        """Write the message's steps and requests."""
        lines: list[TraceStep | RequestRecord] = []
        for record in message.records:
            if isinstance(record, StepRecord):
                lines.append(msgspec.convert(record, TraceStep, from_attributes=True))
            elif isinstance(record, RequestRecord):
                lines.append(record)
        if lines:
            self._file.write(self._encoder.encode_lines(lines))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
