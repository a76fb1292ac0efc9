"""The folder of one experiment: a trace for each cell, whole or not there, and what belongs to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from filelock import FileLock, Timeout

from minedraft_core.config import ConfigError
from minedraft_core.experiments.grid import Cell, Session
from minedraft_core.trace import RunHeader

_PARTIAL = ".partial"


@dataclass(frozen=True)
class Store:
    """Paths under `folder`."""

    folder: Path

    @property
    def traces(self) -> Path:
        """The traces, one a cell, and one for each session that was refused."""
        return self.folder / "traces"

    @property
    def models(self) -> Path:
        """Model folders made for the experiment."""
        return self.folder / "models"

    @property
    def report(self) -> Path:
        """The report's folder."""
        return self.folder / "report"

    def profile(self, session: Session) -> Path:
        """The profile of a session, without its suffix."""
        return self.folder / "profiles" / session.name

    def recording(self, target: str, key: str) -> Path:
        """What plain decoding wrote, for drafters that replay it; `key` stands for the requests that it answered."""
        return self.folder / "recordings" / f"{target.rpartition('/')[2]}-{key}.json"

    def trace(self, cell: Cell) -> Path:
        """The trace of a cell."""
        return self.traces / f"{cell.name}.jsonl"

    def refusal(self, session: Session) -> Path:
        """Where it is written that a session was refused."""
        return self.traces / f"refused-{session.name}.jsonl"

    def all_traces(self) -> list[Path]:
        """Every trace, refusals too, by name."""
        return sorted(self.traces.glob("*.jsonl"))

    def finished(self, cell: Cell, settings: Mapping[str, Any]) -> bool:
        """Whether the cell has its trace. Raises ConfigError where that was made with other settings; those not named may be any."""
        path = self.trace(cell)
        if not path.exists():
            return False
        with path.open("rb") as file:
            try:
                header = msgspec.json.decode(file.readline(), type=RunHeader)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ConfigError(f"{path} is no trace of an experiment ({error}): remove it, or name another --out") from None
        if different := sorted(key for key in settings if header.settings.get(key) != settings.get(key)):
            changes = ", ".join(f"{key} {header.settings.get(key)!r} is now {settings.get(key)!r}" for key in different)
            raise ConfigError(f"{path} was made with other settings ({changes}): remove it, or name another --out")
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for one process; the system frees it when that dies. Raises ConfigError where another one holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / ".lock", timeout=0):
                yield
        except Timeout:
            raise ConfigError(f"another run writes to {self.folder}: wait until it has ended, or name another --out") from None

    @contextmanager
    def writing(self, path: Path) -> Iterator[BinaryIO]:
        """A file that appears under its name once the block has ended well."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}{_PARTIAL}")
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
