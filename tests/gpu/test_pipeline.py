"""The pipeline on real weights and real devices: the stages of `tests/gpu/check` on the embedded model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minedraft_core.conversion import truncate_layers
from minedraft_core.embedded import prepare

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1800)]
LAYERS = 24
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The target, and its first layers as a drafter that is right now and then."""
    target, draft = prepare(progress=False).target, tmp_path_factory.mktemp("draft")
    truncate_layers(target, draft, LAYERS)
    return str(target), str(draft)


@pytest.mark.parametrize("stage", ["start", "twin", "sync", "greedy", "acceptance", "pearl"])
def test_stage(models: tuple[str, str], stage: str) -> None:
    devices = "1,0" if torch.cuda.device_count() > 1 else "0"
    target, draft = models
    command = [sys.executable, "-m", "tests.gpu.check", stage, "--target", target, "--draft", draft, "--devices", devices]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
