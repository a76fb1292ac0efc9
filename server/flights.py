"""Requests in flight: each ends when its work is done, when its client goes, or when the server must stop it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection before the response was complete."""


class StoppedError(Exception):
    """The server ended the work because it is shutting down."""


class Flights:
    """The set of running work."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, T], receive: Receive) -> T:
        """Run `work` while watching the connection. On every way out nothing of it is left running.

        Raises ClientGoneError, StoppedError or what `work` raises.
        """
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(receive))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
            if task.cancelled():
                raise StoppedError
            return task.result()
        finally:
            await _end(task, gone)
            self._tasks.discard(task)

    def stop_all(self) -> None:
        """End all running work; each `run` then raises StoppedError."""
        for task in self._tasks:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
