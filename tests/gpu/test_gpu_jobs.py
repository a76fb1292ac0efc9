"""Jobs for the cards of one machine: in order, never two on a card that do not share it, each with its limit."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from string import Template

import pytest
import typer

from minedraft_core.bench.cli import bench_app
from minedraft_core.config import ConfigError
from minedraft_core.training.cli import train
from tests.gpu import jobs as jobs_module
from tests.gpu.check.commands import parser
from tests.gpu.jobs import Job, check_cards, chosen, read, run, startable


def _command(function):
    app = typer.Typer()
    app.command()(function)
    return typer.main.get_command(app)


def names(jobs: list[Job]) -> list[str]:
    return [job.name for job in jobs]


def test_cards_are_shared_by_those_that_share() -> None:
    small, other, large = (
        Job(name="small", run="", gpus=(0, 1), share=True),
        Job(name="other", run="", gpus=(1,), share=True),
        Job(name="large", run="", gpus=(1, 2)),
    )
    assert names(startable([small, other, large], [], ())) == ["small", "other"]
    assert names(startable([large], [small], ())) == []
    assert names(startable([large], [], ())) == ["large"]
    assert names(startable([other], [large], ())) == []


def test_a_job_that_waits_for_its_cards_is_not_overtaken_there() -> None:
    large, small, elsewhere = (
        Job(name="large", run="", gpus=(0, 1)),
        Job(name="small", run="", gpus=(1,), share=True),
        Job(name="elsewhere", run="", gpus=(2,)),
    )
    assert names(startable([large, small, elsewhere], [Job(name="busy", run="", gpus=(0,))], ())) == ["elsewhere"]


def test_a_job_that_waits_for_another_one_keeps_no_cards() -> None:
    late, small = Job(name="late", run="", gpus=(0,), after=("first",)), Job(name="small", run="", gpus=(0,))
    assert names(startable([late, small], [], ())) == ["small"]
    assert names(startable([late, small], [], ("first",))) == ["late"]


def test_they_run_with_their_cards_and_limits(tmp_path: Path) -> None:
    jobs = [
        Job(name="a", run="echo $CUDA_VISIBLE_DEVICES; echo 1 > $OUT/a.txt; exit 3", gpus=(2, 0)),
        Job(name="b", run="cat $OUT/a.txt", after=("a",)),
        Job(name="c", run="sleep 60 & sleep 60; wait", limit=0.5),
    ]
    assert run(jobs, tmp_path) == {"a": 3, "b": 0, "c": 124}
    assert (tmp_path / "a.log").read_text() == "2,0\n"
    assert (tmp_path / "b.log").read_text() == "1\n"
    assert "c: ended with 124" in (tmp_path / "status").read_text()


def test_a_file_with_a_mistake_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text('[[job]]\nname = "a"\nrun = ""\nafter = ["b"]\n[[job]]\nname = "b"\nrun = ""\n')
    with pytest.raises(ConfigError, match="a waits for b, which is no job before it"):
        read(path)
    path.write_text('[[job]]\nname = "a"\nrun = ""\n[[job]]\nname = "a"\nrun = ""\n')
    with pytest.raises(ConfigError, match="two jobs are called a"):
        read(path)


def test_some_of_a_file_run_in_the_order_they_are_named_in() -> None:
    jobs = [Job(name="a", run=""), Job(name="b", run="", after=("a",)), Job(name="c", run="", after=("a", "b"))]
    assert chosen(jobs, ["c", "b"]) == [jobs[2].model_copy(update={"after": ("b",)}), jobs[1].model_copy(update={"after": ()})]
    with pytest.raises(ConfigError, match="--only: no job is called d; there are a, b, c"):
        chosen(jobs, ["a", "d"])


@pytest.mark.parametrize(("name", "cards"), [("jobs.toml", 4), ("one-card.toml", 1)])
def test_the_commands_of_the_shipped_lists_are_right(name: str, cards: int, tmp_path: Path) -> None:
    commands = {"bench": typer.main.get_command(bench_app).commands["engine"], "drafter": _command(train)}
    places = dict.fromkeys(("T", "D", "OUT", "SHAPES"), str(tmp_path))
    for job in read(Path(__file__).with_name(name)):
        assert all(card < cards for card in job.gpus)
        words = shlex.split(Template(job.run).substitute(places))
        if "server.cli" in words:
            assert words[:3] == ["python3", "-m", "server.cli"]
            kind, _, *rest = words[3:]
            commands[kind].make_context(kind, rest)
            continue
        if words[1] == "-c":
            compile(words[2], job.name, "exec")
            continue
        assert words[:3] == ["python3", "-m", "tests.gpu.check"]
        arguments = parser().parse_args(words[3:])
        assert set(arguments.devices) <= set(range(len(job.gpus))) or arguments.stages in (["step"], ["tiles"], ["kernels"])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[[job]\n", "not valid TOML"),
        ("", "job: Field required"),
        ('[[job]]\nname = "a"\nrun = ""\ncards = [0]\n', "cards: Extra inputs"),
        ('[[job]]\nname = "a"\nrun = ""\ngpus = "01"\n', "gpus"),
        ('[[job]]\nname = "a"\nrun = ""\ngpus = [-1]\n', "gpus"),
        ('[[job]]\nname = "../a"\nrun = ""\n', "name"),
        ('[[job]]\nname = "a"\nrun = ""\nlimit = "soon"\n', "limit"),
        ('[[job]]\nname = "a"\nrun = ""\n[[job]]\nname = "b"\nrun = ""\nafter = "a"\n', "after"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_fault(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "missing.toml")


def test_cards_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "describe_gpus", lambda: {"devices": [{}, {}]})
    check_cards([Job(name="a", run="", gpus=(0, 1))])
    with pytest.raises(ConfigError, match=r"has 2 cards, so \[2\] are missing.*: b"):
        check_cards([Job(name="a", run="", gpus=(0, 1)), Job(name="b", run="", gpus=(1, 2))])


# A process in the background, one that left its group, and one that renamed itself, which hides its environment.
LEAVING = "sleep 600 & echo $! >> $OUT/pids; setsid sleep 600 & echo $! >> $OUT/pids; trap '' TERM; "


def numbers(out: Path) -> list[int]:
    path = out / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"]


def test_nothing_of_a_job_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_GRACE_SECONDS", 0.5)
    jobs = [Job(name="a", run=f"{LEAVING} exit 0"), Job(name="b", run=f"{LEAVING} while true; do sleep 1; done", limit=0.5)]
    assert run(jobs, tmp_path) == {"a": 0, "b": 124}
    assert len(numbers(tmp_path)) == 4
    assert not alive(numbers(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_the_runner_whatever_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(f'[[job]]\nname = "a"\nrun = """{LEAVING} wait"""\n')
    command = [sys.executable, "-m", "tests.gpu.jobs", str(path), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL) as runner:
        wait_until(lambda: len(numbers(tmp_path / "out")) == 2)
        runner.send_signal(number)
        time.sleep(0.3)
        # A second signal, of somebody in a hurry, changes nothing.
        runner.send_signal(number)
        assert runner.wait(30) == (-number if number is signal.SIGKILL else 128 + number)
    wait_until(lambda: not alive(numbers(tmp_path / "out")))


def test_in_the_background_they_outlive_who_has_started_them(tmp_path: Path) -> None:
    path, out = tmp_path / "jobs.toml", tmp_path / "out"
    path.write_text(
        '[[job]]\nname = "a"\nrun = "sleep 1; touch $OUT/done"\n[[job]]\nname = "b"\nrun = "touch $OUT/never"\n', encoding="utf-8"
    )
    command = [sys.executable, "-m", "tests.gpu.jobs", str(path), "--out", str(out), "--only", "a", "--background"]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, start_new_session=True)
    assert not (out / "done").exists()
    wait_until(lambda: (out / "jobs.log").read_text() == "a: 0\n")
    assert (out / "done").exists()
    assert not (out / "never").exists()
    wait_until(lambda: not alive([int((out / "pid").read_text())]))
    # Told by half a word, the process in the background would start another one, and so on.
    refused = subprocess.run([*command[:-1], "--back"], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "unrecognized arguments: --back" in refused.stderr


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
