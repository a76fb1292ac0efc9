"""HTTP connections whose client may close its sending side and still read the answer (RFC 9112, section 9.6)."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# A closed connection answers the first write with a reset, which the second one meets.
_FIRST_PROBE_SECONDS = 0.1
_LONGEST_PROBE_SECONDS = 5.0
# An interim response, which every client must be able to skip (RFC 9110, section 15.2).
_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"


class HalfClosableProtocol(HttpToolsProtocol):
    """uvicorn's protocol, for which the end of what a client sends is not the end of the client.

    A client that is gone looks the same at first. So something is written: what a stream has to say, or interim responses until a whole
    response begins. It stays with uvicorn's way, which counts the client as gone, over TLS (asyncio knows no half-closed TLS) and for
    HTTP/1.0 (which knows no interim responses).
    """

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
        self.transport.write(_PROBE)
        self.loop.call_later(wait, self._probe, min(2 * wait, _LONGEST_PROBE_SECONDS))
