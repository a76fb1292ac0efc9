"""Sends one request and says what was seen of it. Needs gevent."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import msgspec
from gevent import GreenletExit
from gevent.ssl import CERT_NONE, SSLContext, create_default_context
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError

from loadtest.clock import Clock
from loadtest.requests import Request
from loadtest.sample import Outcome, Sample
from loadtest.stream import AnswerError, Transcript, refusal
from minedraft_core.config import ConfigError

_OK = 200


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Client:
    """Connections to one server."""

    def __init__(
        self, clock: Clock, host: str, key: str | None, timeout: float, connections: int, *, lasting: bool, insecure: bool
    ) -> None:
        """`host` is the server's address with or without `/v1`; connections that last carry one request after another.

        Raises ConfigError for an address that is none.
        """
        self._clock = clock
        parts = _address(host)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        if not lasting:
            self._headers["Connection"] = "close"
        self._http = HTTPClient.from_url(
            f"{parts.scheme}://{parts.netloc}",
            concurrency=connections,
            connection_timeout=timeout,
            network_timeout=timeout,
            insecure=insecure,
            ssl_context_factory=_trusting if insecure else _checking,
        )

    def first_model(self) -> str:
        """The first model that the server lists. Raises ConfigError where it lists none."""
        try:
            response = self._http.request("GET", f"{self._prefix}/v1/models", headers=self._headers)
            body = response.read()
        except (OSError, HTTPParseError, UnicodeError) as error:
            raise ConfigError(f"--host: the server does not answer: {error}") from None
        if response.status_code != _OK:
            raise ConfigError(f"the server does not list its models ({refusal(response.status_code, body)}); name one with --model")
        try:
            return msgspec.json.decode(body, type=_Models).data[0].id
        except (msgspec.MsgspecError, RecursionError, IndexError):
            raise ConfigError("the server lists no model; name one with --model") from None

    def send(self, request: Request) -> tuple[Sample, BaseException | None]:
        """What was seen of a request, and what ended it before its time: an error, or the end of the test."""
        transcript = Transcript(self._clock)
        start = self._clock.now()
        fault: BaseException | None = None
        try:
            outcome = self._follow(request, transcript)
        except Exception as error:  # noqa: BLE001 - whatever ended a request, it is counted
            outcome, fault = Outcome.FAILED, error
        except GreenletExit as error:
            outcome, fault = Outcome.CUT, error
        end = self._clock.now() if transcript.end is None or fault is not None else transcript.end
        prompt_tokens, completion_tokens = transcript.usage or (0, 0)
        first, spoken = transcript.first, transcript.last_delivery
        sample = Sample(
            endpoint=request.endpoint,
            begin=start,
            end=end - start,
            outcome=outcome,
            first=None if first is None else first - start,
            last=None if transcript.last is None else transcript.last - start,
            spoken=0.0 if first is None or spoken is None else spoken - first,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            deliveries=transcript.deliveries,
            gaps=transcript.gaps,
            error=_one_line(fault) if outcome is Outcome.FAILED else None,
        )
        return sample, fault

    def _follow(self, request: Request, transcript: Transcript) -> Outcome:
        with self._http.request("POST", self._prefix + request.path, request.body, self._headers) as response:
            if response.status_code != _OK:
                raise AnswerError(refusal(response.status_code, response.read()))
            if not transcript.read(response, request.leave_after):
                return Outcome.ABORTED
            # What follows the last event is read, so that the connection can carry the next request.
            response.read()
            return Outcome.DONE

    def close(self) -> None:
        """Close idle connections."""
        self._http.close()


def _address(host: str) -> SplitResult:
    refused = ConfigError(f"--host: {host!r} is no address; give one such as http://127.0.0.1:8000")
    try:
        parts = urlsplit(host)
        # The resolver would complain about a name that is none with a traceback from another thread.
        named = (parts.hostname or "").encode("idna") and parts.port != 0
    except ValueError:
        raise refused from None
    if parts.scheme not in ("http", "https") or not named:
        raise refused
    if parts.username is not None:
        raise ConfigError("--host: an address holds no user and password; give the key with --api-key or --api-key-file")
    return parts


def _checking(**_: object) -> SSLContext:
    """Trust what the system trusts, or the file that SSL_CERT_FILE names."""
    return create_default_context()


def _trusting(**_: object) -> SSLContext:
    context = create_default_context()
    context.check_hostname = False
    context.verify_mode = CERT_NONE
    return context


def _one_line(fault: BaseException | None) -> str:
    text = str(fault) if isinstance(fault, AnswerError) else f"{type(fault).__name__}: {fault}"
    return " ".join(text.split())
