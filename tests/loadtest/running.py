"""Runs load tests as a person does, in processes of their own."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadtest.results import Results, read_results
from loadtest.sample import Sample


@dataclass(frozen=True)
class Known:
    """A running server whose latencies are known."""

    url: str
    told_file: Path

    @property
    def told(self) -> list[dict[str, float]]:
        """What it kept to, request by request; those that it refused or broke off too."""
        return [json.loads(line) for line in self.told_file.read_text().splitlines()]

    @property
    def leavers(self) -> int:
        """Clients that went away before their answer ended."""
        return int(json.load(urllib.request.urlopen(f"{self.url}/leavers", timeout=10))["leavers"])


@contextlib.contextmanager
def known_server(folder: Path, *flags: str, core: int | None = None) -> Iterator[Known]:
    """The server, ended with the block."""
    told = folder / "told.jsonl"
    command = [sys.executable, "-m", "tests.loadtest.known_server", "--told", str(told), *flags]
    with subprocess.Popen(_on(core, command), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Known(f"http://127.0.0.1:{int(process.stdout.readline())}", told)
        finally:
            process.terminate()


def _on(core: int | None, command: list[str]) -> list[str]:
    return command if core is None else ["taskset", "--cpu-list", str(core), *command]


@dataclass(frozen=True)
class Ran:
    """A load test that has ended."""

    code: int
    log: str
    folder: Path

    @property
    def results(self) -> Results:
        return read_results(self.folder / "results.json")

    @property
    def samples(self) -> list[Sample]:
        return msgspec.json.Decoder(Sample).decode_lines((self.folder / "samples.jsonl").read_bytes())

    @property
    def rows(self) -> dict[tuple[str, str], dict[str, str]]:
        """The rows of Locust's CSV file by type and name."""
        with (self.folder / "locust_stats.csv").open() as file:
            return {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}

    @property
    def entries(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The entries of Locust's JSON file by type and name."""
        return {(entry["method"], entry["name"]): entry for entry in json.loads((self.folder / "locust.json").read_text())}


def command_of(url: str, folder: Path, *flags: str) -> list[str]:
    """The command of a load test with all its outputs in `folder`."""
    command = [sys.executable, "-m", "server.cli", "loadtest", "run", "--headless", "--only-summary", "--host", url]
    command += ["--results", str(folder / "results.json"), "--samples", str(folder / "samples.jsonl")]
    return [*command, "--csv", str(folder / "locust"), "--html", str(folder / "locust.html"), "--json-file", str(folder / "locust"), *flags]


def run_load_test(url: str, folder: Path, *flags: str, core: int | None = None, seconds: float = 100, **environment: str) -> Ran:
    """Run a load test to its end."""
    full = {**os.environ, **environment}
    done = subprocess.run(
        _on(core, command_of(url, folder, *flags)), capture_output=True, text=True, timeout=seconds, check=False, env=full
    )
    return Ran(done.returncode, done.stderr, folder)
