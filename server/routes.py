"""What the server answers, path by path."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import vllm
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from server.engine import Engine
from server.errors import ErrorResponse, unavailable
from server.lifecycle import Lifecycle
from server.service import Endpoint, Service, check_model

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request cannot be served as it stands"},
    401: {"description": "The API key is missing or wrong"},
    404: {"description": "No such model"},
    413: {"description": "The body is too large"},
    415: {"description": "The body is not JSON"},
    429: {"description": "The API key is at one of its limits; see Retry-After"},
    500: {"description": "The server failed"},
    503: {"description": "The queue is full or the server is shutting down; see Retry-After"},
}
ERRORS: dict[int | str, dict[str, Any]] = {status: {**entry, "model": ErrorResponse} for status, entry in _ERRORS.items()}


def json_body(schema: str) -> dict[str, Any]:
    """The OpenAPI description of a body that is read by hand."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(schema)}}}}


def _reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _answer(whole: str, chunk: str) -> dict[str, Any]:
    content = {"anyOf": [_reference(chunk), _reference("ErrorResponse")]}
    data = {"anyOf": [{"const": "[DONE]"}, {"type": "string", "contentMediaType": "application/json", "contentSchema": content}]}
    return {
        "description": f"`{whole}`, or with stream: true a stream of server-sent events, each a `{chunk}`, the last one `[DONE]`",
        "content": {
            "application/json": {"schema": _reference(whole)},
            "text/event-stream": {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}},
        },
    }


def generation_router(service: Service, completions: Endpoint, chat: Endpoint) -> APIRouter:
    """POST /v1/completions and POST /v1/chat/completions."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        responses={**ERRORS, 200: _answer("Completion", "Completion")},
        openapi_extra=json_body("CompletionRequest"),
        response_class=Response,
    )
    async def create_completion(request: Request) -> Response:
        """Complete one or several prompts."""
        return await service.answer(request, completions)

    @router.post(
        "/v1/chat/completions",
        responses={**ERRORS, 200: _answer("ChatCompletion", "ChatChunk")},
        openapi_extra=json_body("ChatRequest"),
        response_class=Response,
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        return await service.answer(request, chat)

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
        check_model(model, models)
        return JSONResponse(cards[model])

    return router


def health_router(engine: Engine, lifecycle: Lifecycle, version: str) -> APIRouter:
    """GET and HEAD /health, GET and POST /ping, GET /load, GET /version."""
    router = APIRouter()

    @router.get("/health", responses={503: ERRORS[503]})
    @router.head("/health", responses={503: ERRORS[503]}, include_in_schema=False)
    @router.get("/ping", responses={503: ERRORS[503]})
    @router.head("/ping", responses={503: ERRORS[503]}, include_in_schema=False)
    @router.post("/ping", responses={503: ERRORS[503]}, include_in_schema=False)
    async def health() -> JSONResponse:
        """200 while requests are taken; 503 while the server drains or when its engine is dead."""
        lifecycle.admit()
        try:
            await engine.check_health()
        except Exception as error:
            raise unavailable("the engine is not healthy", "engine_dead") from error
        return JSONResponse({"status": "ok"})

    @router.get("/load", responses={401: ERRORS[401]})
    async def load() -> JSONResponse:
        """Requests that are being answered."""
        return JSONResponse({"server_load": len(lifecycle.flights)})

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
    """GET /metrics: all registries in the format that the client accepts."""
    router = APIRouter()
    union: Any = _Union(tuple(registries))

    @router.get("/metrics", response_class=Response, responses={401: ERRORS[401]})
    async def metrics(request: Request) -> Response:
        """Prometheus metrics."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = await asyncio.to_thread(encode, union)
        return Response(body, headers={"Content-Type": content_type})

    return router
