"""Sending a response's chunks as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from server.errors import APIError, from_engine, unavailable
from server.flights import ClientGoneError, Flights, StoppedError
from server.responses import DONE, as_event


class EventStream(Response):
    """Sends every chunk as soon as the engine delivers it.

    The status waits for the first chunk, so that a request which fails before it gets its own status. Later errors travel as an event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: Callable[[], AsyncGenerator[msgspec.Struct, None]],
        flights: Flights,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"
        self._chunks = chunks
        self._flights = flights
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; on a disconnect nothing more is sent and the engine's requests are aborted."""
        try:
            await self._flights.run(self._pump(send), receive)
        except ClientGoneError:
            return
        except StoppedError:
            await self._fail(send, unavailable("the server is shutting down before the request was complete", "shutting_down"))
        except Exception as error:  # noqa: BLE001 - the client gets it
            await self._fail(send, from_engine(error))

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                if not self._started:
                    await self._start(send)
                await send({"type": "http.response.body", "body": as_event(chunk), "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _fail(self, send: Send, error: APIError) -> None:
        if not self._started:
            raise error
        await send({"type": "http.response.body", "body": b"data: " + error.body() + b"\n\n" + DONE})
