"""How many tokens a second a load test reads on one core with every time right, against the known server on another core.

Usage: python -m tests.loadtest.one_core [--streams 256] [--gaps-ms 20,15,10,8,6,5] [--seconds 30] [--json FILE]
Figures are of the time in which all streams run; a time is right where it is within 5 % of what the server kept to.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from loadtest.figures import Spread
from loadtest.sample import Sample
from minedraft_core.bench.report import versions
from tests.loadtest.running import Ran, command_of, known_server

SPAWN_RATE = 100
MAX_TOKENS = 200
TTFT_MS = "200:1000"
RIGHT = 0.05
DEFINITIONS = {
    "tokens_per_second": "Tokens that the load test read a second while all streams ran.",
    "client_core": "CPU time of the load test over that time; 1 is a whole core.",
    "server_core": "The same of the known server, which has another core.",
    "elsewhere": "The same of all else on the machine; what runs on one of the two cores makes times wrong.",
    "worst_error": "Largest relative error of mean, p50, p90, p95 and p99 of TTFT, TPOT and the whole request, against the known times.",
    "worst": "The time that has it.",
    "right": f"No request failed, the load test gave no warning, and worst_error is at most {RIGHT:g}.",
}


@dataclass(frozen=True)
class Row:
    """One load."""

    streams: int
    gap_ms: float
    requests: int
    tokens_per_second: float
    client_core: float
    server_core: float
    elsewhere: float
    worst_error: float
    worst: str
    warnings: list[str]
    right: bool

    @property
    def line(self) -> str:
        """One line of the table."""
        return (
            f"{self.streams:>8}{self.gap_ms:>8g}{self.requests:>10}{self.tokens_per_second:>10.0f}{self.client_core:>10.2f}"
            f"{self.server_core:>10.2f}{self.elsewhere:>11.2f}{self.worst_error:>9.1%} {self.worst:<10}{'yes' if self.right else 'no':>6}"
        )


HEAD = (
    f"{'streams':>8}{'gap ms':>8}{'requests':>10}{'tokens/s':>10}"
    f"{'client':>10}{'server':>10}{'elsewhere':>11}{'error':>9} {'of':<10}{'right':>6}"
)


def measure(streams: int, gap_ms: float, seconds: float, cores: Sequence[int]) -> Row:
    """One load test on the first of two cores."""
    client, server = cores
    times: list[tuple[float, float, float, float]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        known_server(Path(name), "--ttft-ms", TTFT_MS, "--gap-ms", f"{gap_ms:g}", core=server) as known,
    ):
        flags = ["-u", str(streams), "-r", str(SPAWN_RATE), "-t", f"{seconds:g}s", "--max-tokens", str(MAX_TOKENS)]
        command = ["taskset", "--cpu-list", str(client), *command_of(known.url, Path(name), *flags)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
            client_process = psutil.Process(running.pid)
            (server_process,) = set(psutil.Process().children()) - {client_process}
            while running.poll() is None:
                times.append((time.time(), cpu_seconds(client_process), cpu_seconds(server_process), busy_seconds()))
                time.sleep(0.2)
        ran = Ran(running.returncode, "", Path(name))
        results, samples, told = ran.results, ran.samples, known.told
    figures = results.figures
    # All streams run from when the last user began until no request begins any more.
    begin, end = min(sample.begin for sample in samples) + streams / SPAWN_RATE + 1, max(sample.begin for sample in samples)
    at = [sample[0] for sample in times]
    client_share, server_share, busy = (
        float(np.diff(np.interp([begin, end], at, [sample[kind] for sample in times]))[0]) / (end - begin) for kind in (1, 2, 3)
    )
    error, worst = worst_error(
        {"TTFT": figures.ttft_ms, "TPOT": figures.tpot_ms, "E2E": figures.e2e_ms},
        {name: [request[key] * 1000 for request in told] for name, key in (("TTFT", "ttft"), ("TPOT", "gap"), ("E2E", "e2e"))},
    )
    return Row(
        streams=streams,
        gap_ms=gap_ms,
        requests=figures.done,
        tokens_per_second=sum(tokens_between(sample, begin, end) for sample in samples) / (end - begin),
        client_core=client_share,
        server_core=server_share,
        elsewhere=busy - client_share - server_share,
        worst_error=error,
        worst=worst,
        warnings=results.warnings,
        right=figures.done == len(told) and not results.warnings and error <= RIGHT,
    )


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time that a process has used."""
    used = process.cpu_times()
    return float(used.user + used.system)


def busy_seconds() -> float:
    """CPU time that all cores have worked."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def tokens_between(sample: Sample, begin: float, end: float) -> float:
    """Tokens of a request that came between two times, its tokens being spread evenly from the first to the last."""
    if sample.first is None or sample.last is None:
        return 0.0
    first, last = sample.begin + sample.first, sample.begin + sample.last
    return sample.completion_tokens * max(0.0, min(last, end) - max(first, begin)) / (last - first)


def worst_error(found: dict[str, Spread | None], known: dict[str, list[float]]) -> tuple[float, str]:
    """The largest relative error of a reported mean or percentile, and which one it is."""
    errors: dict[str, float] = {}
    for name, spread in found.items():
        if spread is None:
            return float("inf"), name
        wanted = {"mean": np.mean(known[name]), **{f"p{percent}": np.percentile(known[name], percent) for percent in (50, 90, 95, 99)}}
        errors |= {f"{name} {key}": abs(getattr(spread, key) / float(value) - 1) for key, value in wanted.items()}
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def main() -> None:
    """Measure each load and print a table."""
    allowed = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--gaps-ms", default="20,15,10,8,6,5", help="milliseconds between two tokens of a stream, one load for each")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--client-core", type=int, default=allowed[0])
    parser.add_argument("--server-core", type=int, default=allowed[-1])
    parser.add_argument("--json", type=Path, help="file that gets the rows")
    args = parser.parse_args()
    print(HEAD, flush=True)
    rows: list[Row] = []
    for gap in map(float, args.gaps_ms.split(",")):
        rows.append(measure(args.streams, gap, args.seconds, (args.client_core, args.server_core)))
        print(rows[-1].line, flush=True)
    if args.json:
        kept = {
            "command": shlex.join(["python", "-m", "tests.loadtest.one_core", *sys.argv[1:]]),
            "versions": versions(),
            "cores": os.cpu_count(),
            "load": {"ttft_ms": TTFT_MS, "max_tokens": MAX_TOKENS, "seconds": args.seconds, "spawn_rate": SPAWN_RATE},
            "definitions": DEFINITIONS,
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
