"""What a run was measured with: versions, commit, machine, GPUs and their clocks, command and time."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minedraft_core.bench.report import versions
from minedraft_core.gpus import describe_gpus


def provenance(device: str, target_cores: Sequence[int], drafter_cores: Sequence[int]) -> dict[str, Any]:
    """Everything that is known when an engine starts. `device` is `cpu` or the CUDA device's name."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(Path(__file__).parent),
        "versions": versions(),
        "system": platform.platform(),
        "device": device,
        "gpus": describe_gpus(),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "target_cores": list(target_cores),
        "drafter_cores": list(drafter_cores),
        "cpu_mhz": _cpu_mhz(),
        "load_average": list(os.getloadavg()),
    }


def commit(folder: Path) -> str | None:
    """The commit of the checkout that holds a folder, with `+changes` where files differ from it; None outside a checkout."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_mhz() -> list[float]:
    """Clock of each core as Linux shows it; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
