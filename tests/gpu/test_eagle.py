"""EAGLE heads on CPU as far as that goes: their numbers, what fits and what does not, what the scheduler does for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(module: str, method: str) -> str:
    """In a process of its own: vLLM's process groups are for good."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", f"tests.gpu.{module}", method]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_drafts_are_those_of_the_weights(method: str) -> None:
    assert "accepted" in run("eagle_numbers", method)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_so_are_those_of_vllm(method: str) -> None:
    assert "as expected" in run("eagle_native", method)
