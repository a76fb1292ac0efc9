"""Errors as OpenAI's API gives them: a status and an object with message, type, param and code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import Response
from pydantic import BaseModel, Field
from vllm.exceptions import (
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
    VLLMNotFoundError,
    VLLMUnprocessableEntityError,
)
from vllm.v1.engine.exceptions import EngineDeadError

_logger = logging.getLogger("minedraft.server")

RETRY_AFTER_SECONDS = 5
# For the log alone: nobody reads such an answer.
CLIENT_CLOSED = 499


class ErrorDetail(BaseModel):
    """What went wrong and what to change."""

    message: str = Field(description="what went wrong and what to change, for people")
    type: str = Field(description="the kind of fault by status, such as invalid_request_error, authentication_error or server_error")
    param: str | None = Field(description="the field at fault")
    code: str | None = Field(description="a fixed word for the kind of fault")


class ErrorResponse(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail = Field(description="the fault")


class APIError(Exception):
    """An error meant for the client; `status` is the HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The error object as JSON."""
        detail = {"message": self.message, "type": error_type(self.status), "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": detail})

    def response(self) -> Response:
        """The error object as an HTTP response."""
        return Response(self.body(), self.status, self.headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """A request that cannot be served as it stands; `message` says what to change."""
    return APIError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def unavailable(message: str, code: str) -> APIError:
    """A request that can be sent again, here or elsewhere (RFC 9110, section 15.6.4)."""
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return APIError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, headers=headers)


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    match status:
        case HTTPStatus.UNAUTHORIZED:
            return "authentication_error"
        case HTTPStatus.NOT_FOUND:
            return "not_found_error"
        case HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


def from_engine(error: Exception) -> APIError:
    """Translate what the engine raised. Details of its own faults stay in the log."""
    match error:
        case APIError():
            return error
        case EngineDeadError():
            return unavailable("the engine has stopped; this server is shutting down", "engine_dead")
        case GracefulHTTPError(http_status=HTTPStatus.SERVICE_UNAVAILABLE):
            return unavailable(error.message, "queue_full")
        case GracefulHTTPError():
            return APIError(error.http_status, error.message)
        case RetryableRequestError():
            return unavailable(str(error), "retry")
        case VLLMNotFoundError():
            return APIError(HTTPStatus.NOT_FOUND, str(error))
        case VLLMUnprocessableEntityError():
            return APIError(HTTPStatus.UNPROCESSABLE_ENTITY, _plain(error), param=error.parameter)
        case VLLMClientError():
            return bad_request(_plain(error), getattr(error, "parameter", None))
    _logger.error("a request failed", exc_info=error)
    return APIError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed to complete the request", code="internal_error")


def _plain(error: Exception) -> str:
    first: Any = error.args[0] if error.args else error
    return str(first)
