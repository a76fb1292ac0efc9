"""Requests that ask to go on in another protocol are answered in this one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.conftest import Start

pytestmark = pytest.mark.asyncio(loop_scope="session")

# What Java's HttpClient sends.
_HTTP2 = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
_WEBSOCKET = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
_HELLO = b'{"prompt": "say hello"}'
_WHOLE = b"content-length: %d\r\n\r\n%b" % (len(_HELLO), _HELLO)
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n9\r\n%b\r\ne\r\n%b\r\n0\r\n\r\n" % (_HELLO[:9], _HELLO[9:])


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes, Any]:
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split()[0])
        return int(head.split()[1]), head, json.loads(await reader.readexactly(length))


@pytest.mark.parametrize("body", [_WHOLE, _CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("wish", [_HTTP2, _WEBSOCKET], ids=["http2", "websocket"])
@pytest.mark.parametrize("split", [1, 40, 150, 1000])
async def test_the_body_arrives_and_the_connection_stays(start: Start, wish: bytes, body: bytes, split: int) -> None:
    running = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + wish + body
    for _ in range(2):
        writer.write(request[:split])
        await asyncio.sleep(0.02)
        writer.write(request[split:])
        status, _, completion = await answer(reader)
        assert (status, completion["choices"][0]["text"]) == (200, "hello")
    writer.close()


async def test_requests_behind_it_are_answered_in_turn(start: Start) -> None:
    running = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    writer.write(request + _HTTP2 + _WHOLE + request + _HTTP2 + _CHUNKED + request + _WHOLE)
    for _ in range(3):
        assert (await answer(reader))[2]["choices"][0]["text"] == "hello"
    writer.close()


async def test_a_connection_that_shall_close_is_closed(start: Start) -> None:
    running = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n\r\n")
    status, head, _ = await answer(reader)
    assert (status, b"connection: close" in head) == (200, True)
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    ("path", "status", "kind"), [("/v1/realtime", 404, "not_found_error"), ("/v1/completions", 405, "invalid_request_error")]
)
async def test_websockets_get_an_error_object(start: Start, path: str, status: int, kind: str) -> None:
    running = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (path.encode(), _WEBSOCKET))
    found, head, body = await answer(reader)
    assert (found, body["error"]["type"]) == (status, kind)
    assert b"x-request-id: " in head
    writer.close()


async def test_websockets_need_a_key_too(start: Start) -> None:
    running = await start(api_key=["sk-1"])
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\n" + _WEBSOCKET + b"\r\n")
    assert (await answer(reader))[0] == 401
    writer.close()
