from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

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
