from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.tiny_engine import MODES

# vLLM leaves a ZeroMQ context to the garbage collector.
_NOISE = ("-W", "ignore:Unclosed context:ResourceWarning")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_the_suite_holds_for_vllm(mode: str) -> None:
    command = [sys.executable, "-m", "pytest", str(Path(__file__).parent), "-q", "-x", "-p", "no:cacheprovider", "--timeout=120", *_NOISE]
    done = subprocess.run(command, env={**os.environ, "TEST_ENGINE": mode}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
