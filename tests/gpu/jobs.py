"""Many checks and benchmarks on the cards of one machine, side by side: `python -m tests.gpu.jobs FILE --out FOLDER`.

FILE is TOML with a `[[job]]` for each: `name`, `run` (for bash, in this folder), `gpus` (numbers of the cards, which the job sees as 0, 1,
and so on), `share` (true where other jobs that share may run on the same cards), `limit` (seconds) and `after` (names of jobs that
have to end first, well or not). Jobs start in the order of the file as their cards become free. Each writes FOLDER/NAME.log; `$OUT` is
the folder. FOLDER/status says what runs and what became of the others. SIGTERM ends all.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.2
_TIMED_OUT = 124


@dataclass(frozen=True)
class Job:
    """One command and the cards it needs."""

    name: str
    run: str
    gpus: tuple[int, ...] = ()
    share: bool = False
    limit: float = 600.0
    after: tuple[str, ...] = ()


@dataclass
class Running:
    """A job that has been started."""

    job: Job
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the job, of which some may have outlived the first one."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def end(running: Collection[Running]) -> None:
    """End jobs with all their processes, at the same time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in running:
            each.send(number)
        until = time.monotonic() + _GRACE_SECONDS
        for each in running:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, until - time.monotonic()))


def read(path: Path) -> list[Job]:
    """The jobs of a file. Raises ValueError for a name that comes twice, or that a job waits for and no earlier job has."""
    jobs = [
        Job(**{**entry, "gpus": tuple(entry.get("gpus", ())), "after": tuple(entry.get("after", ()))})
        for entry in tomllib.loads(path.read_text())["job"]
    ]
    names: set[str] = set()
    for job in jobs:
        if job.name in names:
            raise ValueError(f"{path}: two jobs are called {job.name}")
        if missing := set(job.after) - names:
            raise ValueError(f"{path}: {job.name} waits for {', '.join(sorted(missing))}, which is no job before it")
        names.add(job.name)
    return jobs


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
    waiting, running, codes = list(jobs), [], {}
    try:
        while waiting or running:
            for job in startable(waiting, [each.job for each in running], codes):
                waiting.remove(job)
                running.append(_start(job, out))
            time.sleep(_POLL_SECONDS)
            for each in list(running):
                code = each.process.poll()
                if code is None and time.monotonic() - each.began > each.job.limit:
                    code = _TIMED_OUT
                if code is not None:
                    # What a job leaves behind keeps its cards' memory from the next one.
                    end([each])
                    running.remove(each)
                    codes[each.job.name] = code
            _note(out, waiting, running, codes)
    finally:
        end(running)
    return codes


def _start(job: Job, out: Path) -> Running:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, job.gpus)), "OUT": str(out)}
    with (out / f"{job.name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", job.run],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Running(job, process)


def _note(out: Path, waiting: Sequence[Job], running: Sequence[Running], codes: dict[str, int]) -> None:
    lines = [f"{name}: ended with {code}" for name, code in codes.items()]
    lines += [f"{each.job.name}: for {time.monotonic() - each.began:.0f} s" for each in running]
    lines += [f"{job.name}: waits" for job in waiting]
    (out / "status").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.jobs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    jobs = read(arguments.file)
    arguments.out.mkdir(parents=True, exist_ok=True)
    codes = run(jobs, arguments.out.resolve())
    sys.stdout.write("".join(f"{name}: {code}\n" for name, code in codes.items()))
    sys.exit(any(codes.values()))


if __name__ == "__main__":
    main()
