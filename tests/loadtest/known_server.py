"""An OpenAI server whose latencies are known: each request's are drawn from a seed, kept to, and told. A process of its own.

`python -m tests.loadtest.known_server --port N --told FILE --ttft-ms 80:400 --gap-ms 10:40`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import ssl
from pathlib import Path
from typing import Any

MODEL = "known"


class Schedule:
    """When the events of each request are due, in seconds from its arrival. Request by request the same for the same seed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._draws = random.Random(args.seed)
        self._told = args.told.open("a") if args.told else None
        self.count = 0

    def draw(self, tokens: int) -> list[float]:
        """Times of the events that carry text."""
        args = self._args
        self.count += 1
        first = self._draws.uniform(*args.ttft_ms) / 1000
        gap = self._draws.uniform(*args.gap_ms) / 1000
        events = -(-tokens // args.tokens_per_event)
        times = [first + index * gap for index in range(events)]
        if self._told:
            self._told.write(json.dumps({"ttft": first, "gap": gap, "tokens": tokens, "e2e": times[-1]}) + "\n")
            self._told.flush()
        return times

    @property
    def fails(self) -> bool:
        """Whether this request is refused."""
        return bool(self._args.fail_every) and self.count % self._args.fail_every == 0

    @property
    def breaks(self) -> bool:
        """Whether this stream breaks off after its first event."""
        return bool(self._args.break_every) and self.count % self._args.break_every == 0


class Connection(asyncio.Protocol):
    """One client's connection: one request after another."""

    def __init__(self, schedule: Schedule, leavers: list[int], key: str | None) -> None:
        self._schedule = schedule
        self._key = key
        self._leavers = leavers
        self._buffer = b""
        self._due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, _: Exception | None) -> None:
        if self._due is not None:
            self._due.cancel()
            self._leavers[0] += 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        length = lengths[0] if lengths else 0
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._answer(head, rest[:length])

    def _answer(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ")[1].decode()
        if self._key is not None and f"authorization: bearer {self._key}".encode() not in head.lower():
            self._whole(401, {"error": {"message": "a key is needed"}})
            return
        if path == "/leavers":
            self._whole(200, {"leavers": self._leavers[0]})
            return
        if path == "/v1/models":
            self._whole(200, {"data": [{"id": MODEL}]})
            return
        asked = json.loads(body)
        times = self._schedule.draw(asked["max_tokens"])
        if self._schedule.fails:
            self._whole(503, {"error": {"message": "no room", "type": "server_error", "code": None, "param": None}})
            return
        self._chat = path.endswith("/chat/completions")
        prompt = asked.get("prompt") or asked["messages"][0]["content"]
        self._usage = {
            "prompt_tokens": len(prompt.split()) if isinstance(prompt, str) else len(prompt),
            "completion_tokens": asked["max_tokens"],
        }
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if self._chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None})
        choice = {"delta": {"content": " word"}} if self._chat else {"text": " word"}
        self._text = self._framed(
            {"id": "known-1", "model": MODEL, "choices": [{"index": 0, **choice, "finish_reason": None}], "usage": None}
        )
        self._start = asyncio.get_running_loop().time()
        self._step(times, 0, broken=self._schedule.breaks)

    def _step(self, times: list[float], index: int, *, broken: bool) -> None:
        loop = asyncio.get_running_loop()

        def due() -> None:
            self._transport.write(self._text)
            if broken:
                self._due = None
                self._transport.close()
            elif index + 1 < len(times):
                self._step(times, index + 1, broken=False)
            else:
                self._due = None
                self._event({"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}], "usage": None})
                self._event({"choices": [], "usage": self._usage})
                self._transport.write(self._chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        self._due = loop.call_at(self._start + times[index], due)

    def _event(self, event: dict[str, Any]) -> None:
        self._transport.write(self._framed(event))

    def _framed(self, event: dict[str, Any]) -> bytes:
        return self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    @staticmethod
    def _chunk(data: bytes) -> bytes:
        return b"%x\r\n" % len(data) + data + b"\r\n"

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self._transport.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)


def span(text: str) -> tuple[float, float]:
    """`LEAST:MOST` in milliseconds."""
    least, _, most = text.partition(":")
    return float(least), float(most or least)


async def serve(args: argparse.Namespace) -> None:
    schedule, leavers = Schedule(args), [0]
    loop = asyncio.get_running_loop()
    context = None
    if args.certificate:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(args.certificate, args.certificate_key)
    server = await loop.create_server(lambda: Connection(schedule, leavers, args.key), "127.0.0.1", args.port, backlog=1024, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve until the process is ended; the first line printed is the port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--told", type=Path)
    parser.add_argument("--ttft-ms", type=span, default=(100.0, 400.0))
    parser.add_argument("--gap-ms", type=span, default=(20.0, 60.0))
    parser.add_argument("--tokens-per-event", type=int, default=1)
    parser.add_argument("--fail-every", type=int, default=0)
    parser.add_argument("--break-every", type=int, default=0)
    parser.add_argument("--key")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--certificate-key", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
