"""Operating a running server: `POST /admin/mode`, where --enable-admin allows it."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request, Response

from minedraft_core.config import ConfigError
from minedraft_core.control import ControlClient, ControlError, ModeOrder
from minedraft_core.types import Mode
from server.errors import bad_request, unavailable
from server.protocol import read_object
from server.routes import ERRORS
from server.service import read_body

_SCHEMA = {
    "type": "object",
    "properties": {
        "mode": {"type": "string", "enum": [mode.value for mode in Mode]},
        "num_speculative_tokens": {"type": "integer", "minimum": 0},
    },
    "required": ["mode"],
    "additionalProperties": False,
}
_BODY = {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}
_EXAMPLE = '{"mode": "parallel", "num_speculative_tokens": 4}'


def admin_router(control: ControlClient, max_body_bytes: int) -> APIRouter:
    """Routes that change how the engine works. They have to be behind an API key."""
    router = APIRouter(prefix="/admin", tags=["admin"])
    turns = asyncio.Lock()

    @router.post("/mode", responses={status: ERRORS[status] for status in (400, 401, 413, 415, 503)}, openapi_extra={"requestBody": _BODY})
    async def set_mode(http: Request) -> Response:
        """Change the mode and the number of draft tokens from the next step on; running requests go on. Answers what is in force."""
        try:
            order = msgspec.convert(read_object(await read_body(http, max_body_bytes)), ModeOrder)
        except msgspec.ValidationError as error:
            raise bad_request(f"{error}; give an object such as {_EXAMPLE}") from None
        try:
            async with turns:
                answer = await asyncio.to_thread(control.set_mode, order)
        except ConfigError as error:
            raise bad_request(str(error), param="num_speculative_tokens") from None
        except ControlError as error:
            raise unavailable(str(error), code="engine_silent") from None
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router
