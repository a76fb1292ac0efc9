"""Jobs for the cards of one machine: in order, never two on a card that do not share it, each with its limit."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from string import Template

import psutil
import pytest
import typer

from minedraft_core.bench.cli import bench_app
from minedraft_core.training.cli import train
from tests.gpu import jobs as jobs_module
from tests.gpu.check.commands import parser
from tests.gpu.jobs import Job, read, run, startable


def _command(function):
    app = typer.Typer()
    app.command()(function)
    return typer.main.get_command(app)


def names(jobs: list[Job]) -> list[str]:
    return [job.name for job in jobs]


def test_cards_are_shared_by_those_that_share() -> None:
    small, other, large = Job("small", "", (0, 1), share=True), Job("other", "", (1,), share=True), Job("large", "", (1, 2))
    assert names(startable([small, other, large], [], ())) == ["small", "other"]
    assert names(startable([large], [small], ())) == []
    assert names(startable([large], [], ())) == ["large"]
    assert names(startable([other], [large], ())) == []


def test_a_job_that_waits_for_its_cards_is_not_overtaken_there() -> None:
    large, small, elsewhere = Job("large", "", (0, 1)), Job("small", "", (1,), share=True), Job("elsewhere", "", (2,))
    assert names(startable([large, small, elsewhere], [Job("busy", "", (0,))], ())) == ["elsewhere"]


def test_a_job_that_waits_for_another_one_keeps_no_cards() -> None:
    late, small = Job("late", "", (0,), after=("first",)), Job("small", "", (0,))
    assert names(startable([late, small], [], ())) == ["small"]
    assert names(startable([late, small], [], ("first",))) == ["late"]


def test_they_run_with_their_cards_and_limits(tmp_path: Path) -> None:
    jobs = [
        Job("a", "echo $CUDA_VISIBLE_DEVICES; echo 1 > $OUT/a.txt; exit 3", (2, 0)),
        Job("b", "cat $OUT/a.txt", after=("a",)),
        Job("c", "sleep 60 & sleep 60; wait", limit=0.5),
    ]
    assert run(jobs, tmp_path) == {"a": 3, "b": 0, "c": 124}
    assert (tmp_path / "a.log").read_text() == "2,0\n"
    assert (tmp_path / "b.log").read_text() == "1\n"
    assert "c: ended with 124" in (tmp_path / "status").read_text()


def runs(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_a_job_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    assert run([Job("a", "sleep 60 & echo $! > $OUT/left; exit 1")], tmp_path) == {"a": 1}
    left = int((tmp_path / "left").read_text())
    until = time.monotonic() + 5.0
    while runs(left) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs(left)


def test_jobs_that_do_not_listen_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_GRACE_SECONDS", 0.5)
    deaf = "trap '' TERM; while true; do sleep 0.1; done"
    running = [jobs_module._start(Job(name, deaf), tmp_path) for name in "abcdef"]
    time.sleep(0.3)
    began = time.monotonic()
    jobs_module.end(running)
    assert time.monotonic() - began < 2.0
    assert all(each.process.poll() is not None for each in running)


def test_a_file_with_a_mistake_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text('[[job]]\nname = "a"\nrun = ""\nafter = ["b"]\n[[job]]\nname = "b"\nrun = ""\n')
    with pytest.raises(ValueError, match="a waits for b, which is no job before it"):
        read(path)
    path.write_text('[[job]]\nname = "a"\nrun = ""\n[[job]]\nname = "a"\nrun = ""\n')
    with pytest.raises(ValueError, match="two jobs are called a"):
        read(path)


@pytest.mark.parametrize(("name", "cards"), [("jobs.toml", 4), ("one-card.toml", 1)])
def test_the_commands_of_the_shipped_lists_are_right(name: str, cards: int, tmp_path: Path) -> None:
    commands = {"bench": typer.main.get_command(bench_app).commands["engine"], "drafter": _command(train)}
    places = {"PROMPTS": __file__, **dict.fromkeys(("T", "D", "OUT", "SHAPES"), str(tmp_path))}
    for job in read(Path(__file__).with_name(name)):
        assert all(card < cards for card in job.gpus)
        words = shlex.split(Template(job.run).substitute(places))
        if "minedraft" in words:
            kind, _, *rest = words[words.index("minedraft") + 1 :]
            commands[kind].make_context(kind, rest)
            continue
        if words[1] == "-c":
            compile(words[2], job.name, "exec")
            continue
        assert words[:3] == ["python3", "-m", "tests.gpu.check"]
        arguments = parser().parse_args(words[3:])
        assert set(arguments.devices) <= set(range(len(job.gpus))) or arguments.stages in (["step"], ["tiles"], ["kernels"])
