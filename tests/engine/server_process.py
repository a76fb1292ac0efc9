"""`minedraft serve` in a process of its own, as a person starts it."""

from __future__ import annotations

import json
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

from tests.starter import started

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
    trace, log = folder / "trace.jsonl", folder / "log"
    command = [sys.executable, "-m", "server.cli", "serve", "--trace", str(trace), *arguments]
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with started(command, log, START_SECONDS) as (url, process):
        yield Served(url, process, trace, log, headers)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
