"""The engine's end of the draft process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec

from minedraft_core.drafter import DrafterError
from minedraft_core.types import DraftBatch, DraftResult
from minedraft_core.vllm.cpu.messages import DraftProcessConfig, Failed, Forget, FromProcess, Ready, ToProcess


class DraftProcess:
    """A Drafter in a process of its own. The process ends when this end of its socket closes, so it never outlives the engine."""

    def __init__(self, config: DraftProcessConfig) -> None:
        """Start the process; `ready` tells when its model is loaded."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            os.set_inheritable(theirs.fileno(), True)
            command = [sys.executable, "-m", "minedraft_core.vllm.cpu.process", str(theirs.fileno())]
            environment = draft_environment(dict(os.environ), config.cores)
            try:
                with running_on(config.cores):
                    self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
            except OSError as error:
                raise DrafterError("failed", f"the draft process cannot be started: {error}") from error
            self._connection = Connection(ours.detach())
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)
        self._ready = False
        self._send(config)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ready(self) -> bool:
        """Whether the model is loaded."""
        if not self._ready:
            for message in self._receive(0.0):
                if not isinstance(message, Ready):
                    raise DrafterError("rubbish", "the draft process spoke before it was ready")
                self._ready = True
        return self._ready

    def start(self, batch: DraftBatch) -> None:
        """Send an order."""
        self._send(batch)

    def collect(self, timeout: float) -> list[DraftResult]:
        """Answers that are here."""
        answers = []
        for message in self._receive(timeout):
            if not isinstance(message, DraftResult):
                raise DrafterError("rubbish", f"the draft process sent {type(message).__name__} in place of an answer")
            answers.append(message)
        return answers

    def forget(self, request_ids: Sequence[str]) -> None:
        """Tell the process to free requests."""
        self._send(Forget(list(request_ids)))

    def close(self) -> None:
        """End the process at once: it holds nothing worth saving, and the engine loop must not wait for one that hangs."""
        self._connection.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _send(self, message: ToProcess | DraftProcessConfig) -> None:
        try:
            self._connection.send_bytes(self._encoder.encode(message))
        except OSError as error:
            raise DrafterError("died", self._epitaph()) from error

    def _receive(self, timeout: float) -> list[FromProcess]:
        messages: list[FromProcess] = []
        try:
            while self._connection.poll(0.0 if messages else timeout):
                message = self._decoder.decode(self._connection.recv_bytes())
                if isinstance(message, Failed):
                    raise DrafterError("failed", message.message)
                messages.append(message)
        except (EOFError, OSError) as error:
            raise DrafterError("died", self._epitaph()) from error
        except msgspec.MsgspecError as error:
            raise DrafterError("rubbish", f"the draft process sent what cannot be read: {error}") from error
        return messages

    def _epitaph(self) -> str:
        code = self._process.poll()
        return "the draft process closed its end" if code is None else f"the draft process ended with code {code}"


@contextmanager
def running_on(cores: Sequence[int]) -> Iterator[None]:
    """Put this thread on `cores`, none meaning where it is. A process started meanwhile is born there.

    The engine loop is bound to the target's cores. A draft process born there at a restart would share them with a target that never
    rests, and hardly get as far as moving away.
    """
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def draft_environment(environment: dict[str, str], cores: Sequence[int]) -> dict[str, str]:
    """The environment of the draft process: the target's thread binding must not reach it, nor may its threads outnumber its cores."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("KMP_", "GOMP_", "VLLM_CPU_"))}
    threads = {"OMP_NUM_THREADS": str(len(cores))} if cores else {}
    return {**kept, **threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": ""}
