"""`minedraft serve` in a process of its own, as a person starts it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 240


@dataclass(frozen=True)
class Served:
    """A running server. `headers` go with every request."""

    url: str
    process: subprocess.Popen[bytes]
    trace: Path
    log: Path
    headers: dict[str, str] = field(default_factory=dict)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The trace's lines of one type."""
        return [line for line in map(json.loads, self.trace.read_text().splitlines()) if line["type"] == kind]

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=30).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        (value,) = [sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
        return value

    def idle(self) -> bool:
        """Whether nothing runs, waits or holds KV cache."""
        running = self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")
        return running == 0 and self.metric("vllm:kv_cache_usage_perc") == 0

    def below(self) -> list[psutil.Process]:
        """The processes that it started, and those that these started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def draft_process(self) -> psutil.Process:
        """The drafter's process."""
        (found,) = [child for child in self.below() if any("minedraft_core.vllm.cpu.process" in word for word in child.cmdline())]
        return found


@contextmanager
def serving(folder: Path, *arguments: str, key: str | None = None) -> Iterator[Served]:
    """A server of the embedded model that answers; killed at the end. `folder` gets its trace and its log.

    `key` goes with every request; it has to be one of those that the arguments name.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    trace = folder / "trace.jsonl"
    command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), "--trace", str(trace), *arguments]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(f"http://127.0.0.1:{port}"):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield Served(f"http://127.0.0.1:{port}", process, trace, folder / "log", headers)
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
