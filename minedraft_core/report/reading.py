"""From files to traces: this product's own and those of the original plugin, told apart by their first line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from minedraft_core.config import ConfigError
from minedraft_core.report.original import is_bundle, read_bundles
from minedraft_core.report.trace import Ahead, Drafted, Request, Run, Step, Trace
from minedraft_core.trace import RunHeader

_decoder = msgspec.json.Decoder(RunHeader | Step | Request | Drafted | Ahead)
_UNKNOWN = "unknown"
_BEGINNING = b'{"type":'


def read_traces(paths: Sequence[Path]) -> list[Trace]:
    """The trace of each file, in their order, and of a file that says what was refused one for each arm.

    Raises ConfigError for a file that cannot be read or is no trace.
    """
    return [trace for path in paths for trace in _read(path)]


def _read(path: Path) -> list[Trace]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    lines = content.splitlines()
    if not any(map(bytes.strip, lines)):
        raise ConfigError(f"{path} is empty: a trace holds one JSON object a line")
    if is_bundle(next(line for line in lines if line.strip())):
        return [read_bundles(path, lines)]
    return _read_lines(path, lines)


@dataclass
class _Part:
    """The lines since the last header."""

    header: RunHeader | None = None
    steps: list[Step] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    drafted: list[Drafted] = field(default_factory=list)
    ahead: list[Ahead] = field(default_factory=list)

    def add(self, line: Step | Request | Drafted | Ahead) -> None:
        match line:
            case Step():
                self.steps.append(line)
            case Request():
                self.requests.append(line)
            case Drafted():
                self.drafted.append(line)
            case Ahead():
                self.ahead.append(line)

    def run(self) -> Run:
        return Run(tuple(self.steps), tuple(self.requests), tuple(self.drafted), tuple(self.ahead))


def _read_lines(path: Path, lines: Sequence[bytes]) -> list[Trace]:
    remarks: list[str] = []
    parts = [_Part()]
    cut = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            if not _is_cut(line):
                raise ConfigError(f"line {number} of {path} is no line of a trace: {error}") from None
            cut += 1
            continue
        if isinstance(record, RunHeader):
            parts.append(_Part(record))
        elif record.end_us < record.start_us:
            raise ConfigError(f"line {number} of {path} ends before it begins: {record.start_us} to {record.end_us} us")
        else:
            parts[-1].add(record)
    if cut:
        remarks.append(f"{cut} line{'s are' if cut > 1 else ' is'} cut off and left out")
    found = [part for part in parts if part.header is not None or part.steps or part.requests]
    if not found:
        raise ConfigError(
            f"{path} holds no whole step, request or head of a run: give a trace of a server, of an experiment or of the plugin"
        )
    headers = [part.header for part in found if part.header is not None]
    if headers and all(header.refused for header in headers):
        return [Trace(path.stem, header, ()) for header in headers]
    header = headers[0] if headers else _guess(found[0])
    if not headers:
        remarks.append("no head that says what it was measured with: models, number of draft tokens and GPUs are not known")
    if any(_arm(other) != _arm(header) for other in headers):
        raise ConfigError(f"{path} holds runs of several arms; write each into a file of its own")
    runs = tuple(part.run() for part in found if part.steps or part.requests)
    return [Trace(path.stem, header, runs, tuple(remarks))]


def _is_cut(line: bytes) -> bool:
    """Whether a line broke off where its writer was killed; the next writer may have gone on in the same line."""
    text = line.strip()
    gone_on = text.startswith(_BEGINNING) and text.rfind(_BEGINNING) > 0
    return text.startswith(b"{") and (gone_on or not text.endswith(b"}"))


def _arm(header: RunHeader) -> tuple[object, ...]:
    return (header.arm, header.target, header.draft, header.k, header.extra, header.load, header.n, header.dataset, header.acceptance)


def _guess(part: _Part) -> RunHeader:
    """A head for a trace that a server wrote: its modes, and the most requests that a pass held, over both sides where there are two."""
    modes = list(dict.fromkeys(step.mode for step in part.steps if step.mode))
    most = max(((step.batched_requests or 0) * (2 if step.is_parallelised else 1) for step in part.steps), default=0)
    return RunHeader(arm="+".join(modes) or _UNKNOWN, target=_UNKNOWN, load=most)
