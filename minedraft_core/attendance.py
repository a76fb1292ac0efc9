"""Looks after a drafter while no request runs: the engine loop rests then, and would notice a fault with the next request only."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from minedraft_core.ledger import Context
from minedraft_core.supervisor import DraftSupervisor, Gathered


class AttendedDrafting:
    """A supervised drafter, and a thread that looks after it every `interval` seconds. One of the two is at work with it at a time."""

    def __init__(self, supervisor: DraftSupervisor, interval: float = 0.5) -> None:
        self._supervisor = supervisor
        self._interval = interval
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="drafter-attendance", daemon=True)
        self._thread.start()

    def order(self, contexts: Mapping[str, Context], num_tokens: int, ahead: int = 0) -> None:
        """Ask for up to `num_tokens` draft tokens for each request, and for `ahead` more to be made ready."""
        with self._turn:
            self._supervisor.order(contexts, num_tokens, ahead)

    def gather(self, request_ids: Collection[str]) -> Gathered:
        """Wait for the drafts of these requests, within reason."""
        with self._turn:
            return self._supervisor.gather(request_ids)

    def forget(self, request_id: str) -> None:
        """The request ended or lost its place."""
        with self._turn:
            self._supervisor.forget(request_id)

    def close(self) -> None:
        """End the thread and the drafter."""
        self._stop.set()
        self._thread.join()
        self._supervisor.close()

    def _attend(self) -> None:
        while not self._stop.wait(self._interval):
            with self._turn:
                self._supervisor.look_after()
