"""The ASGI application, put together from its collaborators."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.routing import Match

from server import dashboard
from server.chat import ChatEndpoint
from server.chat_protocol import ChatRequest
from server.chat_responses import ChatChunk, ChatCompletion
from server.completions import CompletionEndpoint
from server.counting import RequestCounter
from server.engine import Engine
from server.errors import APIError
from server.lifecycle import Lifecycle
from server.limits import KeyLimits
from server.middleware import REQUEST_ID_HEADER, ApiKeys, CrossOrigin, Faults, RequestContext
from server.observation import Report, ignore
from server.prompts import PromptReader
from server.protocol import CompletionRequest
from server.rendering import ChatRenderer
from server.responses import Completion, json_schemas
from server.routes import GENERATING_PATHS, generation_router, health_router, metrics_router, model_router
from server.runner import Runner
from server.service import IGNORED_FIELDS_HEADER, Service
from server.settings import Settings
from server.tokenization import DetokenizeBody, Tokenization, TokenizeBody, tokenization_router


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document; bodies are read by hand, so their schemas are added here."""
        if self.openapi_schema is None:
            document = get_openapi(title=self.title, version=self.version, routes=self.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for request in (CompletionRequest, ChatRequest, TokenizeBody, DetokenizeBody):
                schema = request.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas |= schema.pop("$defs", {}) | {request.__name__: schema}
            # FastAPI's own refusal of parameters never comes: a path's part is always a string.
            for operation in (operation for path in document["paths"].values() for operation in path.values()):
                operation["responses"].pop("422", None)
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            schemas |= json_schemas(Completion, ChatCompletion, ChatChunk)[1]
            self.openapi_schema = document
        return self.openapi_schema


def create_app(
    engine: Engine,
    settings: Settings,
    *,
    lifecycle: Lifecycle | None = None,
    registries: Iterable[Collector] = (),
    routers: Iterable[APIRouter] = (),
    report: Report = ignore,
) -> FastAPI:
    """The application over `engine`.

    `registries` are served at /metrics; `routers` are added as they are, behind the API key; `report` gets a record of each
    finished choice. The engine stays the caller's to shut down.
    """
    lifecycle = lifecycle or Lifecycle(engine, settings.drain_timeout)
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        executor.shutdown(wait=False, cancel_futures=True)

    version = _version()
    app = _Application(title="MineDraft", version=version, lifespan=lifespan, redirect_slashes=False)
    tokenizer, model = engine.get_tokenizer(), engine.model_config
    models = settings.served_model_name or (settings.model or model.model,)
    service = Service(settings, lifecycle, Runner(engine, report), models)
    completions = CompletionEndpoint(engine, PromptReader(tokenizer, model, executor), settings.max_choices)
    renderer = ChatRenderer(engine, settings)
    app.include_router(generation_router(service, completions, ChatEndpoint(engine, renderer)))
    app.include_router(tokenization_router(Tokenization(engine, renderer), models, settings.max_body_bytes))
    app.include_router(model_router(models, model.model, model.max_model_len, int(time.time())))
    app.include_router(health_router(engine, lifecycle, version))
    counter = RequestCounter(app.routes, GENERATING_PATHS)
    app.include_router(metrics_router([*registries, counter.registry]))
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(APIError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    _add_middleware(app, settings, counter)
    return app


def _add_middleware(app: FastAPI, settings: Settings, counter: RequestCounter) -> None:
    # The last one added is the outermost.
    per_key = (settings.max_concurrent_per_key, settings.max_requests_per_minute_per_key)
    if settings.api_key and any(per_key):
        app.add_middleware(KeyLimits, concurrent=per_key[0], per_minute=per_key[1], paths=GENERATING_PATHS)
    if settings.api_key:
        keys = [key.get_secret_value() for key in settings.api_key]
        open_paths = ["/health", "/ping", *(["/metrics"] if settings.metrics_open else [])]
        app.add_middleware(ApiKeys, keys=keys, open_paths=open_paths, pages=dashboard.PATHS)
    app.add_middleware(Faults)
    if settings.cors_allow_origins:
        app.add_middleware(
            CrossOrigin,
            allow_origins=list(settings.cors_allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, IGNORED_FIELDS_HEADER],
        )
    app.add_middleware(RequestContext, counter=counter, access_log=settings.access_log)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, headers = error.detail, error.headers
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path}; see /docs for what there is"
    elif error.status_code == 405:
        allowed = ", ".join(_methods(request))
        message, headers = f"{request.method} is not allowed at {request.url.path}; use {allowed}", {"Allow": allowed}
    return APIError(error.status_code, message, headers=headers).response()


def _methods(request: Request) -> list[str]:
    """The methods of a path. Starlette names those of the first route alone, and a path can have several."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods or ()})


def _version() -> str:
    try:
        return distribution_version("minedraft")
    except PackageNotFoundError:
        return "0+unknown"
