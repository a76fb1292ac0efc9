"""An experiment on real engines: it ends with a report, and a second call finds everything done."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "server.cli", "experiment", "experiment_8_nsys", "--mode", "parallel", "--out"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_experiment_runs_and_is_resumed(tmp_path: Path) -> None:
    # A process of its own: vLLM's client leaves a ZeroMQ context open until its process ends.
    result = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "experiment_8_nsys-cpu"
    with (folder / "report" / "arms.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["load"]) for row in rows] == [
        ("parallel k=2", "4"),
        ("parallel k=4", "4"),
        ("parallel k=2", "8"),
        ("parallel k=4", "8"),
    ]
    for row in rows:
        assert float(row["tok/s"]) > 0
        assert 0 < float(row["TTFT p50 ms"]) <= float(row["latency p50 ms"])
        assert float(row["hidden"]) > 0.5
        assert 1 < float(row["acceptance length"]) <= 5
        assert len(row["by position"].split()) == int(row["arm"][-1])
        assert int(row["requests"]) == 24
    # All requests arrive at once: at half the load half of them wait.
    assert float(rows[0]["wait p90 ms"]) > float(rows[2]["wait p90 ms"])
    assert (folder / "report" / "plots" / "lanes.svg").exists()
    again = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "vLLM" not in again.stderr
    assert "EngineCore" not in again.stderr
