"""The one channel from the engine to the server: records out, never blocking.

Processes push, the server pulls. A full queue drops records and counts them; the count travels with the next message that goes out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

from minedraft_core.types import Record

_QUEUED_MESSAGES = 10_000
_POLL_MS = 200


class FeedMessage(msgspec.Struct, frozen=True, array_like=True):
    """Records of one engine step. `dropped` counts records that this sender lost since its previous message."""

    dropped: int
    records: list[Record]


class Feed(Protocol):
    """Takes records from the engine's threads; never blocks, never raises."""

    def push(self, records: Sequence[Record]) -> None:
        """Hand over the records of one step."""
        ...

    def close(self) -> None:
        """Let what is queued go out, then end."""
        ...


class NoFeed:
    """For an engine that nobody watches."""

    def push(self, records: Sequence[Record]) -> None:
        """Nothing listens."""

    def close(self) -> None:
        """Nothing to end."""


class FeedWriter:
    """Pushes records to a ZeroMQ address, from any thread."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._dropped = 0
        self._turn = threading.Lock()

    def push(self, records: Sequence[Record]) -> None:
        """Send the records of one step, or count them as dropped where the queue is full."""
        with self._turn:
            try:
                self._socket.send(self._encoder.encode(FeedMessage(self._dropped, list(records))), zmq.NOBLOCK)
                self._dropped = 0
            except zmq.Again:
                self._dropped += len(records)

    def close(self) -> None:
        """Give what is queued half a second to go out."""
        self._socket.close()
        self._context.term()


class FeedReader:
    """Pulls records on a thread of its own and hands each message to the sinks, in order.

    A sink is called with the message; it must be quick and must not raise.
    """

    def __init__(self, address: str, sinks: Sequence[Callable[[FeedMessage], None]]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        self._socket.bind(address)
        self._sinks = tuple(sinks)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed-reader", daemon=True)

    def start(self) -> None:
        """Begin to pull."""
        self._thread.start()

    def close(self) -> None:
        """Take in what has arrived, then end the thread."""
        self._stop.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._context.term()

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(FeedMessage)
        while True:
            if not self._socket.poll(0 if self._stop.is_set() else _POLL_MS):
                if self._stop.is_set():
                    return
                continue
            message = decoder.decode(self._socket.recv())
            for sink in self._sinks:
                sink(message)
