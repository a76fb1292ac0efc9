"""What the server answers, path by path."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import vllm
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from server.completions import CompletionRunner, Job
from server.engine import Engine, Tokenizer
from server.errors import APIError, ErrorResponse, bad_request, from_engine, unavailable
from server.flights import ClientGoneError, StoppedError
from server.lifecycle import Lifecycle
from server.prompts import PromptReader
from server.protocol import CompletionRequest
from server.responses import as_json, json_schema
from server.sampling import build_params
from server.settings import Settings
from server.streaming import EventStream

IGNORED_FIELDS_HEADER = "X-MineDraft-Ignored-Fields"
_TRACE_HEADERS = ("traceparent", "tracestate")
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request cannot be served as it stands"},
    401: {"description": "The API key is missing or wrong"},
    404: {"description": "No such model"},
    413: {"description": "The body is too large"},
    415: {"description": "The body is not JSON"},
    500: {"description": "The server failed"},
    503: {"description": "The queue is full or the server is shutting down; see Retry-After"},
}
ERRORS: dict[int | str, dict[str, Any]] = {status: {**entry, "model": ErrorResponse} for status, entry in _ERRORS.items()}


@dataclass(frozen=True)
class CompletionService:
    """Everything a completion needs."""

    engine: Engine
    settings: Settings
    lifecycle: Lifecycle
    reader: PromptReader
    runner: CompletionRunner
    models: Sequence[str]
    defaults: dict[str, Any]
    hidden_ids: frozenset[int]

    async def answer(self, http: Request) -> Response:
        """Check the request, run it, and answer it whole or as a stream. Raises APIError."""
        self.lifecycle.admit()
        request = CompletionRequest.parse(await _read_body(http, self.settings.max_body_bytes))
        job = await self._job(http, request)
        self.lifecycle.admit()
        headers = _ignored_header(request.ignored_fields)
        tally = http.state.tally
        if request.stream:
            return EventStream(lambda: self.runner.stream(job, tally), self.lifecycle.flights, headers)
        completion = await self.lifecycle.flights.run(self.runner.complete(job, tally), http.receive)
        return Response(as_json(completion), headers=headers, media_type="application/json")

    async def _job(self, http: Request, request: CompletionRequest) -> Job:
        model = self.models[0] if request.model is None else request.model
        if model not in self.models:
            raise _unknown_model(model, self.models)
        if request.n > self.settings.max_n:
            raise bad_request(f"n is {request.n}; at most {self.settings.max_n} choices are allowed", "n")
        params = build_params(request, self.defaults)
        prompts = await self.reader.read(request, self.settings.max_choices)
        state = http.state
        name = state.request_id if state.own_id else f"{state.request_id}-{uuid.uuid4().hex[:8]}"
        hidden = self.hidden_ids if request.skip_special_tokens else frozenset()
        trace = {key: http.headers[key] for key in _TRACE_HEADERS if key in http.headers}
        return Job(f"cmpl-{name}", model, request, prompts, params, hidden, trace or None)


def completion_router(service: CompletionService) -> APIRouter:
    """POST /v1/completions."""
    router = APIRouter()
    schema, _ = json_schema()
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CompletionRequest"}}}}
    ok = {
        "description": "The completion, or with stream: true its chunks as server-sent events",
        "content": {"application/json": {"schema": schema}, "text/event-stream": {"schema": {"type": "string"}}},
    }

    @router.post("/v1/completions", responses={**ERRORS, 200: ok}, openapi_extra={"requestBody": body}, response_class=Response)
    async def create_completion(request: Request) -> Response:
        """Complete one or several prompts."""
        try:
            return await service.answer(request)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=499)
        except StoppedError:
            raise unavailable("the server is shutting down before the request was complete", "shutting_down") from None
        except Exception as error:
            raise from_engine(error) from error

    return router


def model_router(models: Sequence[str], root: str, max_model_len: int, created: int) -> APIRouter:
    """GET /v1/models and GET /v1/models/{id}."""
    router = APIRouter()
    cards = {
        name: {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "minedraft",
            "root": root,
            "parent": None,
            "max_model_len": max_model_len,
        }
        for name in models
    }

    @router.get("/v1/models", responses={401: ERRORS[401]})
    async def list_models() -> JSONResponse:
        """All names the model is served under."""
        return JSONResponse({"object": "list", "data": list(cards.values())})

    @router.get("/v1/models/{model:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
    async def get_model(model: str) -> JSONResponse:
        """One of the names."""
        if model not in cards:
            raise _unknown_model(model, models)
        return JSONResponse(cards[model])

    return router


def health_router(engine: Engine, lifecycle: Lifecycle, version: str) -> APIRouter:
    """GET /health, GET and POST /ping, GET /version."""
    router = APIRouter()

    @router.get("/health", responses={503: ERRORS[503]})
    @router.get("/ping", responses={503: ERRORS[503]})
    @router.post("/ping", responses={503: ERRORS[503]}, include_in_schema=False)
    async def health() -> JSONResponse:
        """200 while requests are taken; 503 while the server drains or when its engine is dead."""
        lifecycle.admit()
        try:
            await engine.check_health()
        except Exception as error:
            raise unavailable("the engine is not healthy", "engine_dead") from error
        return JSONResponse({"status": "ok"})

    @router.get("/version", responses={401: ERRORS[401]})
    async def versions() -> JSONResponse:
        """Version of MineDraft and of vLLM."""
        return JSONResponse({"version": version, "vllm": vllm.__version__})

    return router


@dataclass(frozen=True)
class _Union(Collector):
    registries: tuple[Collector, ...] = field(default=())

    def collect(self) -> Iterator[Metric]:
        for registry in self.registries:
            yield from registry.collect()


def metrics_router(registries: Iterable[Collector]) -> APIRouter:
    """GET /metrics: all registries in Prometheus' text format.

    Not in OpenMetrics: its encoder turns the colons in the names of vLLM's metrics into underscores for every client that does not
    ask for `escaping=allow-utf-8`, so names would depend on the version of Prometheus.
    """
    router = APIRouter()
    union: Any = _Union(tuple(registries))

    @router.get("/metrics", response_class=Response, responses={401: ERRORS[401]})
    async def metrics() -> Response:
        """Prometheus metrics."""
        body = await asyncio.to_thread(generate_latest, union)
        return Response(body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return router


def hidden_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that `skip_special_tokens` leaves out of the text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in added.items() if token.special}


async def _read_body(http: Request, limit: int) -> bytes:
    kind = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise APIError(415, f"Content-Type is {kind!r}; send JSON with Content-Type: application/json", code="unsupported_media_type")
    too_large = APIError(413, f"the body is larger than {limit} bytes; send less or raise --max-body-bytes", code="body_too_large")
    length = http.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _unknown_model(name: str, models: Sequence[str]) -> APIError:
    return APIError(404, f"the model {name!r} does not exist; served: {', '.join(models)}", param="model", code="model_not_found")


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    if not names:
        return {}
    readable = (name.encode("ascii", "backslashreplace").decode() for name in names[:20])
    return {IGNORED_FIELDS_HEADER: ", ".join("".join(c if c.isprintable() else "?" for c in name[:64]) for name in readable)}
