"""Many checks and benchmarks on the cards of one machine, side by side: `python -m tests.gpu.jobs FILE --out FOLDER`.

FILE is TOML with a `[[job]]` for each: `name`, `run` (for bash, in this folder), `gpus` (numbers of the cards, which the job sees as 0, 1,
and so on), `share` (true where other jobs that share may run on the same cards), `limit` (seconds) and `after` (names of jobs that
have to end first, well or not). Jobs start in the order of the file as their cards become free. Each writes FOLDER/NAME.log; `$OUT` is
the folder. FOLDER/status says what runs and what became of the others. With its own process a job's others have to end; they get eight
seconds. SIGTERM, SIGINT or SIGHUP end all, and all is killed where this process is.

`--only NAME,NAME` takes some of them, in that order. `--background` returns at once, and the jobs outlive the terminal: FOLDER/pid has the
number of the process that runs them, and FOLDER/jobs.log what it says.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, ValidationError

from minedraft_core.config import ConfigError
from minedraft_core.errors import USAGE_ERROR, error_line
from minedraft_core.gpus import describe_gpus
from tests.gpu import family
from tests.gpu.family import MARK, kill, members

_GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.2
_TIMED_OUT = 124
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Job(BaseModel):
    """One command and the cards it needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[\w.-]+$")
    run: str
    gpus: tuple[NonNegativeInt, ...] = ()
    share: bool = False
    limit: PositiveFloat = 600.0
    after: tuple[str, ...] = ()


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    job: list[Job]


@dataclass
class Running:
    """A job that has been started. `code` is what it will be counted with, once that is known; it may live on until `deadline`."""

    job: Job
    process: subprocess.Popen[bytes]
    mark: str
    began: float = field(default_factory=time.monotonic)
    code: int | None = None
    deadline: float = math.inf

    def ended(self, now: float) -> bool:
        """Whether no process of it is left; one that met its limit, or whose own process has ended, is helped along."""
        if self.code is None and (code := self.process.poll()) is not None:
            self.code, self.deadline = code, min(self.deadline, now + _GRACE_SECONDS)
        if self.code is None and now - self.began > self.job.limit:
            self.code = _TIMED_OUT
            self.stop(now)
        if now < self.deadline and (self.code is None or members({self.process.pid}, self.mark)):
            return False
        self.kill()
        return True

    def stop(self, now: float) -> None:
        """Ask it to end."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.deadline = now + _GRACE_SECONDS

    def kill(self) -> None:
        """End all its processes, those that have left its group too."""
        kill({self.process.pid}, self.mark)
        self.process.wait()


def read(path: Path) -> list[Job]:
    """The jobs of a file.

    Raises ConfigError for a file that cannot be read, entries and values that no job has, a name that comes twice, and one that a job
    waits for and no earlier job has.
    """
    try:
        jobs = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).job
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"{path}: {faults}") from None
    names: set[str] = set()
    for job in jobs:
        if job.name in names:
            raise ConfigError(f"{path}: two jobs are called {job.name}")
        if missing := set(job.after) - names:
            raise ConfigError(f"{path}: {job.name} waits for {', '.join(sorted(missing))}, which is no job before it")
        names.add(job.name)
    return jobs


def chosen(jobs: Sequence[Job], names: Sequence[str]) -> list[Job]:
    """The jobs with these names, in that order; what they wait for and is not among them counts as done.

    Raises ConfigError for a name that no job has.
    """
    known = {job.name: job for job in jobs}
    if missing := set(names) - set(known):
        raise ConfigError(f"--only: no job is called {', '.join(sorted(missing))}; there are {', '.join(known)}")
    return [known[name].model_copy(update={"after": tuple(set(known[name].after) & set(names))}) for name in names]


def check_cards(jobs: Sequence[Job]) -> None:
    """Raise ConfigError where a job names a card that this machine does not have."""
    wanted = {card for job in jobs for card in job.gpus}
    there = range(len(describe_gpus().get("devices", ())))
    if missing := sorted(wanted - set(there)):
        names = ", ".join(job.name for job in jobs if set(job.gpus) & set(missing))
        raise ConfigError(f"this machine has {len(there)} cards, so {missing} are missing; leave these jobs out, or renumber: {names}")


def startable(waiting: Sequence[Job], running: Collection[Job], ended: Collection[str]) -> list[Job]:
    """Those that can start now. A job whose cards are not free yet keeps later ones from them; one that waits for other jobs does not."""
    found: list[Job] = []
    held: set[int] = set()
    for job in waiting:
        if not set(job.after) <= set(ended):
            continue
        others = [other for other in (*running, *found) if set(other.gpus) & set(job.gpus)]
        if set(job.gpus) & held or any(not (other.share and job.share) for other in others):
            held |= set(job.gpus)
        else:
            found.append(job)
    return found


def run(jobs: Sequence[Job], out: Path) -> dict[str, int]:
    """Run them all and return their exit codes, 124 for those that met their limit."""
    waiting = list(jobs)
    running: list[Running] = []
    codes: dict[str, int] = {}
    with _guard() as (name, guard):
        try:
            while waiting or running:
                for job in startable(waiting, [each.job for each in running], codes):
                    waiting.remove(job)
                    running.append(_start(job, out, name))
                    guard.write(f"{running[-1].process.pid}\n")
                    guard.flush()
                time.sleep(_POLL_SECONDS)
                for each in [each for each in running if each.ended(time.monotonic())]:
                    running.remove(each)
                    codes[each.job.name] = each.code or 0
                _note(out, waiting, running, codes)
        finally:
            _end(running)
    return codes


@contextmanager
def _guard() -> Iterator[tuple[str, IO[str]]]:
    """A name for the run, and where to tell a process that kills its jobs when this one is killed which groups they are."""
    name = uuid.uuid4().hex
    command = [sys.executable, family.__file__, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True) as guard:
        assert guard.stdin is not None
        yield name, guard.stdin


def _end(running: Sequence[Running]) -> None:
    """End all that runs, whatever signals come meanwhile."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    for each in running:
        each.stop(time.monotonic())
    while any(not each.ended(time.monotonic()) for each in running):
        time.sleep(_POLL_SECONDS)
    for number, handler in before.items():
        signal.signal(number, handler)


def _start(job: Job, out: Path, run_name: str) -> Running:
    mark = f"{run_name}/{job.name}/"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, job.gpus)), "OUT": str(out), MARK: mark}
    with (out / f"{job.name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", job.run],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Running(job, process, mark)


def _note(out: Path, waiting: Sequence[Job], running: Sequence[Running], codes: dict[str, int]) -> None:
    lines = [f"{name}: ended with {code}" for name, code in codes.items()]
    lines += [f"{each.job.name}: for {time.monotonic() - each.began:.0f} s" for each in running]
    lines += [f"{job.name}: waits" for job in waiting]
    (out / "status").write_text("\n".join(lines) + "\n")


def _leave(out: Path) -> None:
    """Run the same command line in a session of its own."""
    command = [sys.executable, "-m", "tests.gpu.jobs", *(word for word in sys.argv[1:] if word != "--background")]
    with (out / "jobs.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    (out / "pid").write_text(f"{process.pid}\n")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.jobs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", metavar="NAMES")
    parser.add_argument("--background", action="store_true")
    arguments = parser.parse_args()
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        jobs = read(arguments.file)
        if arguments.only is not None:
            jobs = chosen(jobs, arguments.only.split(","))
        check_cards(jobs)
        arguments.out.mkdir(parents=True, exist_ok=True)
        if arguments.background:
            _leave(arguments.out)
            return
        codes = run(jobs, arguments.out.resolve())
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error_line(error)}\n")
        sys.exit(USAGE_ERROR)
    finally:
        # While Python ends it would hear none of them, and die of the next.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    sys.stdout.write("".join(f"{name}: {code}\n" for name, code in codes.items()))
    sys.exit(any(codes.values()))


if __name__ == "__main__":
    main()
