"""What the server adds to each token, and how many streams it holds, beside vLLM's own server over the same engine.

Usage: python -m tests.overhead.run --model FOLDER [--streams 64,128,...] [--seconds 10] [--chat] [--in-steps] [--requests N]
The engine emits each stream's tokens at their times, and a token's text is its time. The server has one core; the client and the process
that paces the engine have another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.overhead.serve import NAME
from tests.starter import free_port

# The first tokens of a stream wait for the requests that begin beside it.
WARM_TOKENS = 20
STAMP = re.compile(rb'" (\d{12,})"')
SERVERS = ("ours", "vllm")


@dataclass(frozen=True)
class Measurement:
    """Delay from when a token was due to when the client had it, in milliseconds."""

    server: str
    streams: int
    tokens: int
    expected: int
    p50: float
    p99: float
    longest: float
    resident_mb: float

    @property
    def row(self) -> str:
        """One line of the table."""
        share = 100 * self.tokens / self.expected
        return (
            f"{self.server:<8}{self.streams:>8}{share:>11.1f}{self.p50:>9.3f}{self.p99:>9.3f}{self.longest:>9.2f}{self.resident_mb:>9.0f}"
        )


HEAD = f"{'server':<8}{'streams':>8}{'tokens %':>11}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'RSS MB':>9}"


async def stream(port: int, path: str, body: bytes, delays: list[float], start: float) -> None:
    """Read one stream and note the delay of every token after the first ones."""
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    seen = 0
    while data := await reader.read(1 << 16):
        now = time.monotonic_ns()
        for stamp in STAMP.findall(data):
            seen += 1
            if seen > WARM_TOKENS:
                delays.append((now - int(stamp)) / 1e6)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def load(port: int, streams: int, tokens: int, rate: float, *, chat: bool) -> list[float]:
    """Delays of all tokens of so many streams, whose times are spread over the interval between two tokens."""
    fields = {"messages": [{"role": "user", "content": "go"}]} if chat else {"prompt": "go"}
    body = json.dumps({"model": NAME, "max_tokens": tokens, "stream": True, **fields}).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    delays: list[float] = []
    start = time.monotonic() + 0.2
    # Spread over the interval too, whatever the number: the golden ratio's multiples fall apart evenly.
    offsets = (index * 0.02 + (index * 0.618034) % 1 / rate for index in range(streams))
    await asyncio.gather(*(stream(port, path, body, delays, start + offset) for offset in offsets))
    return delays


@contextlib.contextmanager
def serving(server: str, args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Port and process id of a server on a core of its own."""
    port = free_port()
    command = [sys.executable, "-m", "tests.overhead.serve", server, "--port", str(port), "--model", str(args.model)]
    command += [
        "--rate",
        str(args.rate),
        "--core",
        str(args.server_core),
        "--pacer-core",
        str(args.client_core),
        *(["--in-steps"] if args.in_steps else []),
    ]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.2)
        else:
            raise RuntimeError(f"the server {server} did not start")
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def resident_mb(pid: int) -> float:
    """Memory that a process holds, in MB."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def measure(server: str, port: int, pid: int, streams: int, args: argparse.Namespace) -> Measurement:
    """One load on a running server."""
    tokens = round(args.seconds * args.rate) + WARM_TOKENS
    delays = sorted(asyncio.run(load(port, streams, tokens, args.rate, chat=args.chat)))
    expected = streams * (tokens - WARM_TOKENS)
    if not delays:
        raise RuntimeError(f"{server}: no token came")
    return Measurement(
        server, streams, len(delays), expected, delays[len(delays) // 2], delays[int(len(delays) * 0.99)], delays[-1], resident_mb(pid)
    )


async def many(port: int, total: int, *, chat: bool) -> None:
    """So many short requests, 64 at a time."""
    left = iter(range(total))

    async def worker() -> None:
        fields = {"messages": [{"role": "user", "content": "go"}]} if chat else {"prompt": "go"}
        body = json.dumps({"model": NAME, "max_tokens": 1, **fields}).encode()
        path = "/v1/chat/completions" if chat else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
            assert length is not None, answer
            await reader.readexactly(int(length[1]))
        writer.close()

    await asyncio.gather(*(worker() for _ in range(64)))


def memory(port: int, pid: int, args: argparse.Namespace) -> None:
    """Print the memory of the server after every tenth of the requests."""
    for tenth in range(1, 11):
        asyncio.run(many(port, args.requests // 10, chat=args.chat))
        print(f"after {args.requests * tenth // 10:>7} requests: {resident_mb(pid):.1f} MB", flush=True)


def main() -> None:
    """Measure both servers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model, for its tokenizer and configuration")
    parser.add_argument("--streams", default="64,96,128,192,256")
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=100.0, help="tokens a second of each stream")
    parser.add_argument("--limit-ms", type=float, default=1.0, help="p99 delay up to which a number of streams holds")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--in-steps", action="store_true", help="all streams get their tokens at the same moments, as from one engine")
    parser.add_argument("--requests", type=int, default=0, help="measure memory over so many short requests in place of delays")
    parser.add_argument("--server-core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--client-core", type=int, default=min(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.client_core})
    holds = dict.fromkeys(args.servers.split(","), 0)
    print(HEAD if not args.requests else "", flush=True)
    for server in holds:
        with serving(server, args) as (port, pid):
            if args.requests:
                print(server)
                memory(port, pid, args)
                continue
            for streams in map(int, args.streams.split(",")):
                found = measure(server, port, pid, streams, args)
                print(found.row, flush=True)
                if found.p99 > args.limit_ms or found.tokens < found.expected:
                    break
                holds[server] = streams
    if not args.requests:
        print(f"most streams with a p99 of at most {args.limit_ms:g} ms: " + ", ".join(f"{name} {most}" for name, most in holds.items()))


if __name__ == "__main__":
    main()
