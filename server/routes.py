"""What the server answers, path by path."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import vllm
from fastapi import APIRouter, Request, Response
from prometheus_client import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field

from server.engine import Engine
from server.errors import ErrorResponse, error_type, unavailable
from server.lifecycle import Lifecycle
from server.service import Endpoint, Service, check_model

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})

_ERRORS: dict[int, tuple[str, str, str | None, str | None]] = {
    400: (
        "The request cannot be served as it stands",
        "temperature cannot be 3: input should be less than or equal to 2",
        "temperature",
        "invalid_value",
    ),
    401: (
        "The API key is missing or wrong",
        "the API key is missing or wrong; send it as: Authorization: Bearer KEY",
        None,
        "invalid_api_key",
    ),
    404: ("No such model", "the model 'x' does not exist; served: y", "model", "model_not_found"),
    413: (
        "The body is larger than --max-body-bytes",
        "the body is larger than 1048576 bytes; send less or raise --max-body-bytes",
        None,
        "body_too_large",
    ),
    415: (
        "The body is not JSON",
        "Content-Type is 'text/plain'; send JSON with Content-Type: application/json",
        None,
        "unsupported_media_type",
    ),
    429: (
        "The API key is at one of its limits; see Retry-After",
        "this key already has 8 requests running; wait for one to end",
        None,
        "rate_limit_exceeded",
    ),
    500: ("The server failed", "the server failed to complete the request", None, "internal_error"),
    503: (
        "The queue is full or the server is shutting down; see Retry-After",
        "the server is shutting down and takes no new requests",
        None,
        "shutting_down",
    ),
}


def _error(status: int) -> dict[str, Any]:
    description, message, param, code = _ERRORS[status]
    example = {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}
    return {"model": ErrorResponse, "description": description, "content": {"application/json": {"example": example}}}


ERRORS: dict[int | str, dict[str, Any]] = {status: _error(status) for status in _ERRORS}


class ModelCard(BaseModel):
    """A name that the model is served under."""

    id: str = Field(description="the name")
    object: Literal["model"] = Field(default="model", description="the kind of object")
    created: int = Field(description="when the server started, in seconds since 1970")
    owned_by: str = Field(default="minedraft", description="always the same")
    root: str = Field(description="folder or name of the model")
    parent: None = Field(default=None, description="never set")
    max_model_len: int = Field(description="tokens that prompt and answer may have together")


class ModelList(BaseModel):
    """All names."""

    object: Literal["list"] = Field(default="list", description="the kind of object")
    data: list[ModelCard] = Field(description="one card for each name")


class Health(BaseModel):
    """The server takes requests."""

    status: Literal["ok"] = Field(default="ok", description="always the same")


class Load(BaseModel):
    """How busy the server is."""

    server_load: int = Field(description="requests that are being answered")


class Versions(BaseModel):
    """What runs here."""

    version: str = Field(description="version of MineDraft")
    vllm: str = Field(description="version of vLLM")


def json_body(schema: str) -> dict[str, Any]:
    """The OpenAPI description of a body that is read by hand."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(schema)}}}}


def _reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _answer(whole: str, chunk: str) -> dict[str, Any]:
    content = {"anyOf": [_reference(chunk), _reference("ErrorResponse")]}
    data = {"anyOf": [{"const": "[DONE]"}, {"type": "string", "contentMediaType": "application/json", "contentSchema": content}]}
    choice = {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    text = {"message": {"role": "assistant", "content": "Hello!", "refusal": None}} if whole == "ChatCompletion" else {"text": " there."}
    example = {
        "id": "chatcmpl-1" if whole == "ChatCompletion" else "cmpl-1",
        "created": 1764500000,
        "model": "SmolLM2-135M-Instruct",
        "choices": [{**choice, **text}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
        "object": "chat.completion" if whole == "ChatCompletion" else "text_completion",
    }
    return {
        "description": f"`{whole}`, or with stream: true a stream of server-sent events, each a `{chunk}`, the last one `[DONE]`",
        "content": {
            "application/json": {"schema": _reference(whole), "example": example},
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
    cards = {name: ModelCard(id=name, created=created, root=root, max_model_len=max_model_len) for name in models}

    @router.get("/v1/models", responses={401: ERRORS[401]})
    async def list_models() -> ModelList:
        """All names the model is served under."""
        return ModelList(data=list(cards.values()))

    @router.get("/v1/models/{model:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
    async def get_model(model: str) -> ModelCard:
        """One of the names."""
        check_model(model, models)
        return cards[model]

    return router


def health_router(engine: Engine, lifecycle: Lifecycle, version: str) -> APIRouter:
    """GET and HEAD /health, GET and POST /ping, GET /load, GET /version."""
    router = APIRouter()

    @router.get("/health", responses={503: ERRORS[503]})
    @router.head("/health", responses={503: ERRORS[503]}, include_in_schema=False)
    @router.get("/ping", responses={503: ERRORS[503]})
    @router.head("/ping", responses={503: ERRORS[503]}, include_in_schema=False)
    @router.post("/ping", responses={503: ERRORS[503]}, include_in_schema=False)
    async def health() -> Health:
        """200 while requests are taken; 503 while the server drains or when its engine is dead."""
        lifecycle.admit()
        try:
            await engine.check_health()
        except Exception as error:
            raise unavailable("the engine is not healthy", "engine_dead") from error
        return Health()

    @router.get("/load", responses={401: ERRORS[401]})
    async def load() -> Load:
        """Requests that are being answered."""
        return Load(server_load=len(lifecycle.flights))

    @router.get("/version", responses={401: ERRORS[401]})
    async def versions() -> Versions:
        """Version of MineDraft and of vLLM."""
        return Versions(version=version, vllm=vllm.__version__)

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
