"""Servers in processes of their own. Standard library alone: a bare machine with GPUs has nothing else to ask with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    """A port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextmanager
def started(command: Sequence[str], log: Path, seconds: float) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Address and process of a server that answers; killed at the end with its process group, if it still runs.

    The command is told its address as --host and --port. Raises RuntimeError with the end of its log where it does not answer in time.
    """
    port = free_port()
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + seconds
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=output, stderr=output, start_new_session=True
        )
    try:
        while not _healthy(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {end_of(log)}")
            time.sleep(0.5)
        yield address, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_of(log: Path) -> str:
    """What a log says last."""
    return log.read_text(errors="replace")[-3000:]


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False
