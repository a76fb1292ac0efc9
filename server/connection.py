"""HTTP connections whose client may close its sending side and still read the answer (RFC 9112, section 9.6)."""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import APIError, bad_request

# A closed connection answers the first write with a reset, which the second one meets.
_FIRST_PROBE_SECONDS = 0.1
_LONGEST_PROBE_SECONDS = 5.0
# An interim response, which every client must be able to skip (RFC 9110, section 15.2).
_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
# Bytes of a head, or of what frames a body, that may come before they make sense. The transport reads 256 KiB at a time.
_MOST_UNPARSED = 64 * 1024
# What asks to go on in another protocol: headers, and options of the header `connection`.
_WISHES = (b"upgrade", b"http2-settings")


class HalfClosableProtocol(HttpToolsProtocol):
    """uvicorn's protocol, for which the end of what a client sends is not the end of the client.

    A client that is gone looks the same at first. So something is written: what a stream has to say, or interim responses until a whole
    response begins. It stays with uvicorn's way, which counts the client as gone, over TLS (asyncio knows no half-closed TLS) and for
    HTTP/1.0 (which knows no interim responses).
    """

    # The cycle whose response is due; `cycle` is the one read last, and with pipelined requests that one waits.
    _running: Any = None
    _unparsed = 0
    _data = b""
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, but not for ever."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse what came. A head without end would be kept whole otherwise, and one that stalls would keep its connection."""
        self._unparsed += len(data)
        self._data = data
        super().data_received(data)
        if self._unparsed > _MOST_UNPARSED and not self.transport.is_closing():
            message = f"the request's head or trailer is larger than {_MOST_UNPARSED} bytes; send less"
            self._refuse(APIError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, code="head_too_large"))
        self._watch()

    def on_headers_complete(self) -> None:
        """A head is parsed. One that asks to change the protocol is parsed a second time."""
        self._unparsed = 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body is parsed."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is parsed."""
        self._unparsed = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(bad_request(f"{msg.rstrip('.')}; send HTTP/1.1", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Answer as if the request asked for no other protocol (RFC 9110, section 7.8); Java's client asks for HTTP/2 with every request.

        The parser takes all that follows such a head for the other protocol, so a new one gets the head without the wish, and the rest.
        """
        stopped = sys.exception()
        assert isinstance(stopped, HttpParserUpgrade)
        method, version, rest = self.parser.get_method(), self.parser.get_http_version(), self._data[stopped.args[0] :]
        if method == b"CONNECT":
            self._refuse(bad_request("this server is no proxy; send it other methods than CONNECT", code="invalid_http"))
            return
        kept = [(name, _without_wishes(value) if name == b"connection" else value) for name, value in self.headers if name not in _WISHES]
        head = [b"%b %b HTTP/%b\r\n" % (method, self.url, version.encode()), *(b"%b: %b\r\n" % header for header in kept), b"\r\n"]
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"".join([*head, rest]))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the running request that its client is gone, though others wait behind it."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self._stop_watching()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for the answer."""
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if self.transport.get_extra_info("sslcontext") is not None or cycle.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        self._probe(_FIRST_PROBE_SECONDS)
        return True

    def _probe(self, wait: float) -> None:
        if self.transport.is_closing() or self.cycle.response_started:
            return
        if self._running.response_started and not self._running.response_complete:
            # A response shows by itself whether its client is there.
            self.loop.call_later(wait, self._probe, wait)
            return
        self.transport.write(_PROBE)
        self.loop.call_later(wait, self._probe, min(2 * wait, _LONGEST_PROBE_SECONDS))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _watch(self) -> None:
        """Give the client uvicorn's `timeout_keep_alive` for the next part of a request, unless all of it is here."""
        cycle: Any = self.cycle
        whole = cycle is not None and not cycle.response_complete and not cycle.more_body
        if whole or not self._unparsed:
            self._stop_watching()
        if not whole and self._patience is None:
            self._patience = self.loop.call_later(self.timeout_keep_alive, self._overdue)

    def _stop_watching(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _overdue(self) -> None:
        self._patience = None
        if self._running is self.cycle or self._running.response_complete:
            self.transport.close()
        else:
            # Nothing is read while an earlier request is answered.
            self._watch()

    def _refuse(self, error: APIError) -> None:
        """Close the connection, with `error` where it cannot fall into a response."""
        running = self._running
        in_body = running is not None and running is self.cycle and running.more_body and not running.response_started
        if in_body:
            # Its own answer would come after this one.
            running.disconnected = True
            running.message_event.set()
        if in_body or running is None or running.response_complete:
            body = error.body()
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def _without_wishes(connection: bytes) -> bytes:
    return b",".join(option for option in connection.split(b",") if option.strip().lower() not in _WISHES)
