"""Orders to a running engine: which mode, and how many draft tokens a step. The way back is the feed's.

The scheduler owns the server, whose thread checks an order and answers at once; the scheduler takes it before its next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Annotated, Protocol

import msgspec
import zmq
from msgspec import Meta

from minedraft_core.config import ConfigError
from minedraft_core.types import Mode

_POLL_MS = 200
WITHOUT_LOOKAHEAD = (Mode.OFF, Mode.SEQUENTIAL, Mode.PARALLEL)
"""The modes of an engine on GPUs whose drafter was not started for lookahead."""


class ModeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mode and the number of draft tokens a step that should be in force from the next step on."""

    mode: Mode
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class ModeAnswer(msgspec.Struct, frozen=True):
    """The order that is in force from the next step on, or what is wrong with the one that came."""

    order: ModeOrder | None
    error: str | None = None


class ControlError(RuntimeError):
    """The engine did not answer."""


def check_order(order: ModeOrder, max_tokens: int, modes: Collection[Mode] = WITHOUT_LOOKAHEAD) -> ModeOrder:
    """The order as an engine started with `max_tokens` draft tokens can carry it out. Raises ConfigError where it cannot.

    `modes` are those that it was started for.
    """
    if order.mode not in modes:
        raise ConfigError(
            f"mode {order.mode}: the engine was not started for it; give one of {', '.join(modes)}, or start it with 'force_pearl'"
        )
    if order.mode is Mode.OFF:
        return ModeOrder(Mode.OFF, 0)
    if not max_tokens:
        raise ConfigError(f"mode {order.mode}: the engine was started without a drafter; name one in --speculative-config")
    if not 1 <= order.num_speculative_tokens <= max_tokens:
        raise ConfigError(
            f"num_speculative_tokens: {order.num_speculative_tokens} is not possible; give 1 to {max_tokens}, the engine was started so"
        )
    return order


class Orders(Protocol):
    """Where a scheduler finds its orders."""

    def take(self) -> ModeOrder | None:
        """The newest order since the last call. Never waits."""
        ...

    def close(self) -> None:
        """No more orders."""
        ...


class NoOrders:
    """For an engine that nobody commands."""

    def take(self) -> ModeOrder | None:
        """None ever."""
        return None

    def close(self) -> None:
        """Nothing to end."""


class ControlServer:
    """Takes orders at a ZeroMQ address. `check` returns what will be in force, or raises ConfigError."""

    def __init__(self, address: str, check: Callable[[ModeOrder], ModeOrder]) -> None:
        self._check = check
        self._newest: ModeOrder | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.bind(address)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def take(self) -> ModeOrder | None:
        """The newest order since the last call."""
        if self._newest is None:
            return None
        with self._lock:
            newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._context.term()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(_POLL_MS):
                self._socket.send(msgspec.msgpack.encode(self._answer(self._socket.recv())))

    def _answer(self, message: bytes) -> ModeAnswer:
        try:
            order = self._check(msgspec.msgpack.decode(message, type=ModeOrder))
        except (ConfigError, msgspec.MsgspecError) as error:
            return ModeAnswer(None, str(error))
        with self._lock:
            self._newest = order
        return ModeAnswer(order)


class ControlClient:
    """Gives orders to the server at a ZeroMQ address. One thread at a time."""

    def __init__(self, address: str, timeout: float = 5.0) -> None:
        self._address, self._timeout_ms = address, round(timeout * 1000)
        self._context = zmq.Context()

    def set_mode(self, order: ModeOrder) -> ModeOrder:
        """What is in force from the next step on. Raises ConfigError for an order that is refused, ControlError without an answer."""
        with self._context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._address)
            socket.send(msgspec.msgpack.encode(order))
            if not socket.poll(self._timeout_ms):
                raise ControlError(f"the engine did not answer within {self._timeout_ms / 1000:g} s")
            answer = msgspec.msgpack.decode(socket.recv(), type=ModeAnswer)
        if answer.order is None:
            raise ConfigError(answer.error or "the order was refused")
        return answer.order

    def close(self) -> None:
        """End the client."""
        self._context.term()
