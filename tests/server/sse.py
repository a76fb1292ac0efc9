"""Asking a server and reading its streams in tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of all events; the stream must end with [DONE]."""
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2] == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """The body of a successful completion."""
    response = await client.post("/v1/completions", json={"model": "served", **body})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a successful stream."""
    response = await client.post("/v1/completions", json={"model": "served", "stream": True, **body})
    assert response.status_code == 200, response.text
    return events(response)


async def chat(client: httpx.AsyncClient, content: str = "hello", **body: Any) -> dict[str, Any]:
    """The body of a successful chat whose last message is `content`."""
    response = await client.post("/v1/chat/completions", json=_chat(content, body))
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def chat_stream(client: httpx.AsyncClient, content: str = "hello", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a successful chat stream."""
    response = await client.post("/v1/chat/completions", json={**_chat(content, body), "stream": True})
    assert response.status_code == 200, response.text
    return events(response)


async def chat_refused(client: httpx.AsyncClient, status: int, **body: Any) -> dict[str, Any]:
    """The error object of a refused chat."""
    response = await client.post("/v1/chat/completions", json=_chat("hello", body))
    return _error(response, status)


def _chat(content: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "served", "messages": [{"role": "user", "content": content}], **body}


def said(chunks: list[dict[str, Any]], index: int = 0, key: str = "content") -> str:
    """The text that the deltas of one choice make."""
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(delta.get(key) or "" for delta in deltas)


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text that the chunks of one choice make."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


async def refused(client: httpx.AsyncClient, status: int, **body: Any) -> dict[str, Any]:
    """The error object of a refused completion."""
    return _error(await client.post("/v1/completions", json={"model": "served", **body}), status)


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    return error  # type: ignore[no-any-return]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that a server or an engine brings about."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is awaited signals nothing
            await asyncio.sleep(0.005)
