"""A session under Nsight Systems: the same command again, for this session alone, as a child of the profiler."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from minedraft_core.config import ConfigError

PROFILER = "nsys"


def profiler() -> str:
    """Where the profiler is. Raises ConfigError where it is not installed."""
    found = shutil.which(PROFILER)
    if found is None:
        raise ConfigError(f"this experiment is profiled with Nsight Systems, and {PROFILER} is not on the PATH: install it")
    return found


def profiled(nsys: str, output: Path, command: Sequence[str]) -> list[str]:
    """The command under the profiler, which follows the engine's processes from their fork and tells kernels inside CUDA graphs apart."""
    options = ["--output", str(output), "--force-overwrite", "true", "--trace", "cuda,nvtx,osrt"]
    return [nsys, "profile", *options, "--trace-fork-before-exec=true", "--cuda-graph-trace=node", *command]
