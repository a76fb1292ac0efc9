"""What surrounds every request: its id, the access log, the API key. Pure ASGI, so streams pass through untouched."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.counting import RequestCounter
from server.errors import CLIENT_CLOSED, APIError, bad_request, from_engine
from server.jobs import Tally

_access = logging.getLogger("minedraft.access")

REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_BAD_ID = bad_request(f"{REQUEST_ID_HEADER} may hold 1 to 128 letters, digits and . _ : / + = @ -", code="invalid_request_id")


class RequestContext:
    """Gives every request an id and a tally, and counts and logs it when it ends."""

    def __init__(self, app: ASGIApp, *, counter: RequestCounter, access_log: bool) -> None:
        self._app = app
        self._counter = counter
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        valid = given is None or _REQUEST_ID.fullmatch(given) is not None
        request_id = given.decode() if given is not None and valid else uuid.uuid4().hex
        tally = Tally()
        own = {"request_id": request_id, "own_id": given is None, "bad_id": not valid, "tally": tally}
        scope["state"] = {**scope.get("state", {}), **own}
        started = time.monotonic()
        status = CLIENT_CLOSED

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._counter.count(scope, status)
            if self._access_log:
                _log(scope, status, time.monotonic() - started, request_id, tally)


class Faults:
    """Refuses a request whose id is no good, and turns what nobody caught into a 500: inside CORS, so that pages can read these too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = False

        async def noting_send(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        app = _BAD_ID.response() if scope["state"]["bad_id"] else self._app
        try:
            await app(scope, receive, noting_send)
        except Exception as error:
            if answered:
                raise
            await from_engine(error).response()(scope, receive, send)


class CrossOrigin(CORSMiddleware):
    """Starlette's CORS, whose refusals are error objects."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Whether a page of another origin may send its request."""
        response = super().preflight_response(request_headers)
        if response.status_code == HTTPStatus.OK:
            return response
        message = f"{bytes(response.body).decode()}; pages of the origins in --cors-allow-origins may send {', '.join(self.allow_methods)}"
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return APIError(response.status_code, message, code="cors_refused", headers=kept).response()


class ApiKeys:
    """Lets a request through if it bears one of the keys (RFC 6750), compared in constant time.

    Pages take a key as a password too, whatever the user's name (RFC 7617): a browser asks for it by itself. Other paths do not, for a
    browser would then send it along with what other sites make it post.
    """

    def __init__(self, app: ASGIApp, *, keys: Iterable[str], open_paths: Iterable[str], pages: Iterable[str] = ()) -> None:
        self._app = app
        self._pages = frozenset(pages)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        key = self._key(scope)
        if key is None:
            headers = {"WWW-Authenticate": 'Basic realm="MineDraft", charset="UTF-8"' if scope["path"] in self._pages else "Bearer"}
            message = "the API key is missing or wrong; send it as: Authorization: Bearer KEY"
            await APIError(401, message, code="invalid_api_key", headers=headers).response()(scope, receive, send)
            return
        scope["state"]["api_key"] = key
        await self._app(scope, receive, send)

    def _key(self, scope: Scope) -> int | None:
        """Which of the keys the request bears."""
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        key = key.strip()
        if scheme.lower() == b"basic" and scope["path"] in self._pages:
            key = _password(key)
        elif scheme.lower() != b"bearer":
            return None
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if any(matches) else None


def _password(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _log(scope: Scope, status: int, seconds: float, request_id: str, tally: Tally) -> None:
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "duration_ms": round(seconds * 1000, 1),
        "request_id": request_id,
        "client": scope["client"][0] if scope.get("client") else None,
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
    }
    _access.info("%s %s %d", scope["method"], scope["path"], status, extra={"fields": fields})
