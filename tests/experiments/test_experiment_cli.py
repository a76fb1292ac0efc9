"""The command, as far as it goes without an engine."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from minedraft_core.config import ConfigError
from minedraft_core.experiments.cli import experiment
from minedraft_core.experiments.models import draft_of, target_of
from minedraft_core.experiments.profile import profiled
from minedraft_core.experiments.provenance import commit, provenance

APP = typer.Typer()
APP.command()(experiment)
RUNNER = CliRunner()


def test_the_list_names_all() -> None:
    result = RUNNER.invoke(APP, ["--list"])
    assert result.exit_code == 0
    assert "experiment_8_nsys" in result.output
    assert "Drafters of three sizes" in result.output


def test_a_dry_run_says_what_would_be_run_and_writes_nothing(tmp_path: Path) -> None:
    result = RUNNER.invoke(APP, ["experiment_4_bs", "--dry-run", "--variant", "cpu", "--out", str(tmp_path), "--mode", "parallel"])
    assert result.exit_code == 0, result.output
    assert "4 arms on 1 engines" in result.output
    assert result.output.count("to run") == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason", "code"),
    [
        (
            ["experiment_4_bs", "--variant", "cpu", "--mode", "native"],
            "native: vLLM's own speculative decoding is compared on GPUs only",
            1,
        ),
        (["experiment_5_tetris_llama", "--variant", "paper", "--mode", "pearl"], "'tetris' does not go with 'force_pearl' on GPUs", 0),
    ],
)
def test_a_dry_run_names_what_would_be_refused(tmp_path: Path, arguments: list[str], reason: str, code: int) -> None:
    result = RUNNER.invoke(APP, [*arguments, "--dry-run", "--out", str(tmp_path)])
    (told,) = (line for line in result.output.splitlines() if line.startswith("refused: "))
    assert reason in told
    assert " refused " in result.output
    assert ("to run" in result.output) is (code == 0)
    assert result.exit_code == code


def test_run_all_covers_every_experiment_and_run_parallel_its_mode() -> None:
    every = RUNNER.invoke(APP, ["run-all", "--dry-run", "--variant", "cpu"])
    assert every.output.count(" arms on ") == 11
    parallel = RUNNER.invoke(APP, ["run-parallel", "--dry-run", "--variant", "cpu"])
    assert parallel.output.count(" arms on ") == 11
    assert "sequential k=" not in parallel.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment_4"], "did you mean experiment_4_bs?"),
        (["experiment_1", "--mode", "fast"], "--mode: 'fast' is not possible"),
        (["run-parallel", "--mode", "off"], "give run-all with --mode off"),
        (["experiment_1", "--variant", "tiny"], "--variant: 'tiny' is not possible"),
        (["experiment_1", "--variant", "paper"], "--variant: paper needs GPUs"),
        (["experiment_1", "--dataset", "jokes"], "--dataset: this variant has no prompts called jokes; give one of shipped"),
        (["experiment_1", "--target-cores", "x"], "--target-cores: 'x' is neither a core nor a range of cores"),
        (["experiment_1", "--wait-for-gpus", "5"], "--wait-for-gpus: this installation is for CPUs"),
        (["experiment_1", "--wait-for-gpus-memory", "5"], "--wait-for-gpus-memory needs --wait-for-gpus: name how many"),
        (["experiment_1", "--wait-for-gpus", "5", "--wait-for-gpus-interval", "1e300"], "s are more than a day"),
        (["experiment_1", "--wait-for-gpus-interval", "5", "--dry-run"], "--wait-for-gpus-interval needs --wait-for-gpus: name how many"),
    ],
)
def test_what_cannot_be_done_is_refused_before_an_engine_starts(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(APP, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.output


def test_the_profiler_follows_processes_and_graphs(tmp_path: Path) -> None:
    command = profiled("nsys", tmp_path / "profile", ["minedraft", "experiment"])
    assert command[:2] == ["nsys", "profile"]
    assert command[-2:] == ["minedraft", "experiment"]
    assert {"--trace-fork-before-exec=true", "--cuda-graph-trace=node"} <= set(command)


def test_provenance_says_what_ran_where() -> None:
    found = provenance("cpu", (0,), (1,))
    assert found["versions"]["minedraft"]
    assert found["gpus"] == {}
    assert found["target_cores"] == [0]
    assert len(found["load_average"]) == 3


def test_a_folder_outside_a_checkout_has_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    assert stat.S_ISDIR(tmp_path.stat().st_mode)


def test_a_shape_becomes_a_folder_and_names_are_handed_on(tmp_path: Path) -> None:
    folder = Path(target_of("shape:qwen3-0.6b", tmp_path))
    assert (folder / "config.json").exists()
    assert (Path(draft_of("shape:vicuna-13b-eagle", "target", tmp_path)) / "config.json").exists()
    assert draft_of("maker/model", "target", tmp_path) == "maker/model"
    with pytest.raises(ConfigError, match="no shape is called 'gpt-9'"):
        target_of("shape:gpt-9", tmp_path)
