"""From start to stop: serve, drain on a signal, end when the engine dies."""

from __future__ import annotations

import logging
import signal
import socket
import ssl
import time
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from minedraft_core.config import ConfigError
from server.connection import HalfClosableProtocol
from server.engine import Engine
from server.errors import unavailable
from server.flights import Flights
from server.settings import Settings, flag

_logger = logging.getLogger("minedraft.server")

# Seconds that stopped requests get to send their last bytes.
FLUSH_SECONDS = 2.0
_KEEP_ALIVE_SECONDS = 60


class Lifecycle:
    """Whether new work is taken, and when the server has nothing left to do. `failed` is set where the engine's death is the reason."""

    def __init__(self, engine: Engine, drain_timeout: float) -> None:
        self.flights = Flights()
        self._engine = engine
        self._drain_timeout = drain_timeout
        self._deadline: float | None = None
        self._cause: str | None = None
        self._limit = "the drain timeout is over"
        self._stopped = False
        self.failed = False

    @property
    def draining(self) -> bool:
        """True from the first signal on, or from the engine's death."""
        return self._deadline is not None

    @property
    def engine_dead(self) -> bool:
        """True once the engine is dead."""
        return self._engine.errored

    def admit(self) -> None:
        """Raise APIError (503) if no new work is taken."""
        if self.engine_dead:
            raise unavailable("the engine has stopped; this server is shutting down", "engine_dead")
        if self.draining:
            raise unavailable("the server is shutting down and takes no new requests", "shutting_down")

    def drain(self, now: float, cause: str = "told to end") -> None:
        """Take no new work; what runs may go on for the drain timeout. `now` is monotonic time in seconds, `cause` is for the log."""
        if self._deadline is None:
            self._deadline = now + self._drain_timeout
            # Logged by the next tick: this may run in a signal's handler, in the midst of another line.
            self._cause = cause

    def hurry(self, now: float) -> None:
        """End what runs now; each request still gets its answer that it was ended."""
        if self._deadline is not None and now < self._deadline:
            self._deadline = now
            self._limit = "told to end a second time"

    def tick(self, now: float) -> bool:
        """Move on to where things should be at `now`; true when the server can end."""
        if self.engine_dead and not self.draining:
            _logger.critical("the engine has stopped; shutting down")
            self.failed = True
            self._deadline = now + FLUSH_SECONDS
        if self._deadline is None:
            return False
        if self._cause is not None:
            _logger.info(
                "%s: no new requests are taken; %d running may go on for at most %g s", self._cause, len(self.flights), self._drain_timeout
            )
            self._cause = None
        if not self.flights:
            return True
        if now < self._deadline:
            return False
        if self._stopped:
            return True
        _logger.warning("%s; ending %d requests", self._limit, len(self.flights))
        self.flights.stop_all()
        self._stopped = True
        self._deadline = now + FLUSH_SECONDS
        return False


class HTTPServer(uvicorn.Server):
    """uvicorn that keeps its socket open while it drains, so that health checks get their answer."""

    def __init__(self, app: FastAPI, lifecycle: Lifecycle, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HalfClosableProtocol,
                ws="none",
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_ca_certs=None if settings.ssl_ca_certs is None else str(settings.ssl_ca_certs),
                ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(FLUSH_SECONDS),
            )
        )
        self._lifecycle = lifecycle
        self._signals = 0

    @property
    def exit_code(self) -> int:
        """0 after a signal, 1 after the engine's death."""
        return 1 if self._lifecycle.failed else 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, end what runs on the second, leave on the third."""
        self._signals += 1
        if self._signals > 2:
            self.should_exit = self.force_exit = True
        elif self._signals == 2:
            self._lifecycle.hurry(time.monotonic())
        self._lifecycle.drain(time.monotonic(), signal.Signals(sig).name)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        return await super().on_tick(counter) or self._lifecycle.tick(time.monotonic())


def check_tls(settings: Settings) -> None:
    """Check certificate and key before the engine loads. Raises ConfigError."""
    if settings.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path: Path | None = getattr(settings, name)
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{flag(name)}: {path} cannot be read: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
    except ssl.SSLError:
        message = "give a certificate in PEM form and its private key without a password"
        raise ConfigError(f"{flag('ssl_certfile')} and {flag('ssl_keyfile')} do not fit together: {message}") from None
    try:
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
    except ssl.SSLError:
        raise ConfigError(f"{flag('ssl_ca_certs')}: {settings.ssl_ca_certs} holds no certificate in PEM form") from None


def bind(settings: Settings) -> socket.socket:
    """Take the address before the engine loads, so that a port in use fails at once. Raises OSError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio turns Nagle's algorithm (RFC 896) off where the protocol is named. With it every write after the first of an answer waits
    # for the client's acknowledgement, which clients delay by 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno, f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --host or --port"
        ) from None
    return sock


async def serve(app: FastAPI, lifecycle: Lifecycle, settings: Settings, sock: socket.socket) -> int:
    """Serve until a signal or the engine's death; the exit code of the process. The caller shuts the engine down."""
    server = HTTPServer(app, lifecycle, settings)
    host, port = sock.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    _logger.info("serving on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
    await server.serve(sockets=[sock])
    _logger.info("HTTP has ended; stopping the engine")
    return server.exit_code
