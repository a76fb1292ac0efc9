from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any

import httpx
import pytest

from server import lifecycle
from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine
from tests.server.sse import complete, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def send(port: int, **body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a completion over a bare connection, to be dropped at will."""
    content = json.dumps({"prompt": "go on and on", "max_tokens": 400, **body}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_running_request_is_aborted(fake: FakeEngine, start: Start, streamed: bool, n: int) -> None:
    running = await start()
    fake.step_seconds = 0.01
    _, writer = await send(running.port, stream=streamed, n=n)
    await until(lambda: fake.steps > 2)
    writer.close()
    await until(lambda: not fake.unfinished)
    assert fake.aborted == n
    await until(lambda: not running.lifecycle.flights)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_waiting_request_is_aborted(fake: FakeEngine, start: Start, streamed: bool) -> None:
    running = await start()
    fake.paused = True
    _, writer = await send(running.port, stream=streamed, n=3)
    await until(lambda: len(fake.seen) == 3)
    writer.close()
    await until(lambda: not fake.unfinished)
    assert fake.steps == 0


async def test_a_client_that_stops_reading_keeps_nobody_else(fake: FakeEngine, start: Start) -> None:
    running = await start()
    reader, writer = await send(running.port, stream=True)
    await reader.readline()
    await complete(running.client, prompt="say hello", max_tokens=20)
    writer.close()
    await until(lambda: not fake.unfinished)


async def test_every_third_of_many_clients_leaves(fake: FakeEngine, start: Start) -> None:
    running = await start()
    fake.step_seconds, fake.max_num_seqs = 0.002, 16
    before = asyncio.all_tasks()

    async def use(index: int) -> str:
        if index % 3:
            choice = (await complete(running.client, prompt=f"say number {index}", max_tokens=60))["choices"][0]
            return str(choice["text"])
        reader, writer = await send(running.port, stream=index % 2 == 0, n=1 + index % 4)
        if index % 2 == 0:
            await reader.readuntil(b"data: ")
        writer.close()
        return ""

    texts = await asyncio.gather(*(use(index) for index in range(60)))
    assert texts == [f"number {index}" if index % 3 else "" for index in range(60)]
    await until(lambda: not fake.unfinished and not running.lifecycle.flights)
    assert fake.aborted > 0
    await until(lambda: len(asyncio.all_tasks() - before) <= 1)


async def test_a_body_that_never_ends(start: Start) -> None:
    running = await start()
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompt"')
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    assert (await running.client.get("/health")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_half_a_body_is_no_failure(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    logged: list[tuple[str, Any]] = []
    for name in ("minedraft.access", "minedraft.server"):
        caplog.set_level(logging.INFO, name)
        monkeypatch.setattr(
            logging.getLogger(name), "handle", lambda record: logged.append((record.levelname, record.__dict__.get("fields")))
        )
    running = await start()
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b'POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompt"' % path.encode())
    await asyncio.sleep(0.05)
    logged.clear()
    writer.close()
    await until(lambda: len(logged) > 0)
    assert [(level, fields["status"]) for level, fields in logged] == [("INFO", 499)]


async def test_reset_connections(fake: FakeEngine, start: Start) -> None:
    running = await start()
    fake.step_seconds = 0.005
    body = {"prompt": "go", "max_tokens": 400, "stream": True}
    async with (
        httpx.AsyncClient(base_url=running.client.base_url) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for _ in response.aiter_lines():
            break
    await until(lambda: not fake.unfinished)


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_engine_is_left_clean(client: httpx.AsyncClient, engine: Any, streamed: bool) -> None:
    _, writer = await send(client.base_url.port or 0, stream=streamed, n=4, ignore_eos=True)
    await until(lambda: engine.get_num_unfinished_requests() > 0)
    writer.close()
    await until(lambda: not engine.get_num_unfinished_requests())
    await complete(client, prompt="still here")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_only_stops_sending_gets_its_answer(fake: FakeEngine, start: Start, streamed: bool) -> None:
    running = await start()
    fake.step_seconds = 0.02
    reader, writer = await send(running.port, stream=streamed, max_tokens=60)
    writer.write_eof()
    async with asyncio.timeout(20):
        answer = (await reader.read()).decode()
    interim, _, final = answer.rpartition("HTTP/1.1 200 OK")
    assert set(interim.split()) <= {"HTTP/1.1", "102", "Processing"}
    assert '"finish_reason":"length"' in final
    assert fake.aborted == 0
    writer.close()


async def test_half_a_request_is_no_request(fake: FakeEngine, start: Start) -> None:
    running = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    writer.write_eof()
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()
    await until(lambda: not running.lifecycle.flights)
    assert not fake.seen


async def test_interim_responses_stay_out_of_a_response(fake: FakeEngine, start: Start) -> None:
    running = await start()
    fake.step_seconds = 0.02
    reader, writer = await send(running.port, stream=True, max_tokens=60)
    for streamed in (False, True):
        content = json.dumps({"prompt": "go on", "max_tokens": 60, "stream": streamed}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
    writer.write_eof()
    async with asyncio.timeout(20):
        answers = await reader.read()
    writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert answers.count(b'"finish_reason":"length"') == 3
    before = answers.split(b"HTTP/1.1 102 Processing\r\n\r\n")[:-1]
    assert len(before) > 1
    assert all(part == b"" or part.endswith((b"\r\n0\r\n\r\n", b"}")) for part in before)


@pytest.mark.parametrize("streamed", [False, True])
async def test_requests_with_others_behind_them_are_aborted(fake: FakeEngine, start: Start, streamed: bool) -> None:
    running = await start()
    fake.paused = True
    _, writer = await send(running.port, stream=streamed)
    content = json.dumps({"prompt": "go on"}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
    await until(lambda: len(fake.seen) == 1)
    writer.transport.abort()
    await until(lambda: not fake.unfinished and not running.lifecycle.flights)
    assert len(fake.seen) == 1


_COMPLETION = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "invalid_http"),
        (_COMPLETION + b"content-length: -1\r\n\r\n", 400, "invalid_http"),
        (_COMPLETION + b"transfer-encoding: gzip\r\n\r\n{}", 400, "invalid_http"),
        (_COMPLETION + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n", 400, "invalid_http"),
        (b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n", 400, "invalid_http"),
        (b"GET /" + b"a" * 400_000, 431, "head_too_large"),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 400_000, 431, "head_too_large"),
        (b"GET /health HTTP/1.1\r\n" + b"x: a\r\n" * 100_000, 431, "head_too_large"),
    ],
    ids=["nonsense", "length", "encoding", "chunk", "proxy", "path", "header", "headers"],
)
async def test_what_is_no_request_is_refused(start: Start, sent: bytes, status: int, code: str) -> None:
    running = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(sent)
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split()[0])
        error = json.loads(await reader.readexactly(length))["error"]
    writer.close()
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


@pytest.mark.parametrize(
    "sent",
    [
        _COMPLETION + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: " + b"a" * 400_000,
        _COMPLETION + b"transfer-encoding: chunked\r\n\r\n2;" + b"a" * 400_000,
    ],
    ids=["trailer", "chunk"],
)
async def test_a_body_that_is_framed_without_end_is_cut_off(start: Start, sent: bytes) -> None:
    running = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(sent)
    async with asyncio.timeout(10):
        with suppress(ConnectionError):
            await reader.read()
    await until(lambda: not running.lifecycle.flights)
    writer.close()


async def test_a_long_head_and_a_long_body_are_no_fault(fake: FakeEngine, start: Start) -> None:
    running = await start()
    headers = {"x-long": "a" * 50_000}
    response = await running.client.post("/v1/completions", json={"prompt": "say hi", "user": "a" * 900_000}, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n", b"GET /hea", _COMPLETION + b"content-length: 9\r\n\r\n{"], ids=["nothing", "line", "head", "body"]
)
async def test_a_client_that_stalls_in_a_request_is_let_go(start: Start, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(lifecycle, "_KEEP_ALIVE_SECONDS", 1)
    running = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(sent)
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_waits_is_not_stalled(fake: FakeEngine, start: Start, monkeypatch: pytest.MonkeyPatch, streamed: bool) -> None:
    monkeypatch.setattr(lifecycle, "_KEEP_ALIVE_SECONDS", 0.1)
    running = await start()
    fake.step_seconds = 0.05
    reader, writer = await send(running.port, stream=streamed, max_tokens=60)
    writer.write(_COMPLETION + b"content-length: 9\r\n\r\n{")
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    assert b'"finish_reason":"length"' in answer
