"""What all endpoints that generate have in common: read, check, plan, run, answer."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from server.constraints import check_constraint
from server.errors import CLIENT_CLOSED, APIError, bad_request, from_engine, unavailable
from server.flights import ClientGoneError, StoppedError
from server.jobs import Job
from server.lifecycle import Lifecycle
from server.prompts import Prompt
from server.protocol import GenerationRequest
from server.responses import as_json
from server.runner import Form, Runner
from server.sampling import ServingParams
from server.settings import Settings
from server.streaming import EventStream

IGNORED_FIELDS_HEADER = "X-MineDraft-Ignored-Fields"
_TRACE_HEADERS = ("traceparent", "tracestate")


@dataclass(frozen=True, slots=True)
class Call:
    """Who asks: the id of the answer, the name of the model as the client gave it, and what is passed on to the engine."""

    id: str
    model: str
    trace_headers: Mapping[str, str] | None
    speculation_metrics: bool

    def job(
        self,
        request: GenerationRequest,
        prompts: Sequence[Prompt],
        params: ServingParams,
        reasoning: Mapping[str, Any] | None = None,
    ) -> Job:
        """The job of a checked request."""
        options = request.stream_options
        include_usage = options is not None and options.include_usage
        return Job(
            id=self.id,
            prompts=prompts,
            n=request.n,
            params=params,
            priority=request.priority,
            trace_headers=self.trace_headers,
            reasoning=reasoning or {},
            include_usage=include_usage,
            running_usage=include_usage and options is not None and options.continuous_usage_stats,
            speculation_metrics=self.speculation_metrics,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, and how to answer."""

    job: Job
    form: Form


class Endpoint(Protocol):
    """One way to ask the model. Its answers' ids begin with `prefix`."""

    prefix: str

    def parse(self, body: bytes) -> Any:
        """Read the body into a `GenerationRequest`. Raises APIError."""

    async def plan(self, request: Any, call: Call) -> Plan:
        """The job and the form of its answer. Raises APIError or vLLM's client errors."""


@dataclass(frozen=True)
class Service:
    """Everything that answering takes."""

    settings: Settings
    lifecycle: Lifecycle
    runner: Runner
    models: Sequence[str]

    async def answer(self, http: Request, endpoint: Endpoint) -> Response:
        """Check the request, run it, and answer it whole or as a stream. Raises APIError."""
        try:
            return await self._answer(http, endpoint)
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED)
        except StoppedError:
            raise unavailable("the server is shutting down before the request was complete", "shutting_down") from None
        except Exception as error:
            raise from_engine(error) from error

    async def _answer(self, http: Request, endpoint: Endpoint) -> Response:
        self.lifecycle.admit()
        request: GenerationRequest = endpoint.parse(await read_body(http, self.settings.max_body_bytes))
        self._check(request)
        plan = await endpoint.plan(request, self._call(http, request, endpoint.prefix))
        check_constraint(plan.job.params.structured_outputs, self.settings.max_constraint_seconds, _constraining_field(request))
        self.lifecycle.admit()
        headers = ignored_header(request.ignored_fields)
        flights, tally = self.lifecycle.flights, http.state.tally
        if request.stream:
            return EventStream(lambda: self.runner.stream(plan.job, plan.form, tally), flights, headers)
        body = await flights.run(self.runner.complete(plan.job, plan.form, tally), http.receive)
        return Response(as_json(body), headers=headers, media_type="application/json")

    def _check(self, request: GenerationRequest) -> None:
        check_model(request.model, self.models)
        if request.n > self.settings.max_n:
            raise bad_request(f"n is {request.n}; at most {self.settings.max_n} choices are allowed", "n")
        configured = 0 if self.settings.speculative_config is None else self.settings.speculative_config.num_speculative_tokens
        wanted = request.num_speculative_tokens
        if wanted is not None and wanted > configured:
            message = f"num_speculative_tokens is {wanted}; this server drafts at most {configured} tokens a step: ask for no more"
            raise bad_request(message, "num_speculative_tokens")

    def _call(self, http: Request, request: GenerationRequest, prefix: str) -> Call:
        state = http.state
        name = state.request_id if state.own_id else f"{state.request_id}-{uuid.uuid4().hex[:8]}"
        trace = {key: http.headers[key] for key in _TRACE_HEADERS if key in http.headers}
        model = self.models[0] if request.model is None else request.model
        report = request.include_speculation_metrics or self.settings.per_request_spec_decode_metrics != "none"
        return Call(f"{prefix}-{name}", model, trace or None, report)


def _constraining_field(request: GenerationRequest) -> str:
    if request.structured_outputs is not None:
        return "structured_outputs"
    constrains = request.response_format is not None and request.response_format.type != "text"
    return "response_format" if constrains else "tools"


def check_model(name: str | None, models: Sequence[str]) -> None:
    """Raise APIError (404) for a name that is not served."""
    if name is not None and name not in models:
        raise APIError(404, f"the model {name!r} does not exist; served: {', '.join(models)}", param="model", code="model_not_found")


async def read_body(http: Request, limit: int) -> bytes:
    """The body of a JSON request of at most `limit` bytes. Raises APIError (413, 415, and 499 where the client leaves)."""
    kind = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise APIError(415, f"Content-Type is {kind!r}; send JSON with Content-Type: application/json", code="unsupported_media_type")
    too_large = APIError(413, f"the body is larger than {limit} bytes; send less or raise --max-body-bytes", code="body_too_large")
    length = http.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async for chunk in http.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise APIError(CLIENT_CLOSED, "the client left before its request was complete") from None
    return bytes(body)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names fields which mean nothing here."""
    if not names:
        return {}
    readable = (name.encode("ascii", "backslashreplace").decode() for name in names[:20])
    return {IGNORED_FIELDS_HEADER: ", ".join("".join(c if c.isprintable() else "?" for c in name[:64]) for name in readable)}
