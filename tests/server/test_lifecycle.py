from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket

import httpx
import pytest

from server.lifecycle import Lifecycle, bind
from server.settings import Settings
from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine
from tests.server.sse import complete, events, refused, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(fake: FakeEngine, start: Start, number: int) -> None:
    running = await start()
    fake.step_seconds = 0.02
    request = {"prompt": "say a rather long farewell to all", "max_tokens": 100}
    whole = asyncio.create_task(complete(running.client, **request))
    streamed = asyncio.create_task(running.client.post("/v1/completions", json={**request, "stream": True}))
    await until(lambda: len(fake.seen) == 2)
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.01)
    for path in ("/health", "/ping"):
        assert (await running.client.get(path)).status_code == 503
    response = await running.client.post("/v1/completions", json=request)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "shutting_down"
    assert int(response.headers["retry-after"]) > 0
    assert (await running.client.get("/v1/models")).status_code == 200
    assert (await whole)["choices"][0]["text"] == "a rather long farewell to all"
    assert "".join(chunk["choices"][0]["text"] for chunk in events(await streamed)) == "a rather long farewell to all"
    assert await running.task == 0
    with pytest.raises(httpx.ConnectError):
        await running.client.get("/health")


async def test_the_log_says_what_a_signal_does(fake: FakeEngine, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minedraft.server")
    running = await start(drain_timeout=7)
    fake.step_seconds = 0.02
    whole = asyncio.create_task(complete(running.client, prompt="say a rather long farewell to all", max_tokens=100))
    await until(lambda: bool(fake.seen))
    os.kill(os.getpid(), signal.SIGTERM)
    await whole
    await running.task
    assert caplog.messages[-2:] == [
        "SIGTERM: no new requests are taken; 1 running may go on for at most 7 s",
        "HTTP has ended; stopping the engine",
    ]


async def test_an_idle_server_ends_at_once(start: Start) -> None:
    running = await start()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(2):
        assert await running.task == 0


async def test_the_drain_timeout(fake: FakeEngine, start: Start) -> None:
    running = await start(drain_timeout=0.3)
    fake.step_seconds, fake.tokens_per_step = 0.02, 1
    request = {"prompt": "go on and on", "max_tokens": 400}
    whole = asyncio.create_task(refused(running.client, 503, **request, n=2))
    streamed = asyncio.create_task(running.client.post("/v1/completions", json={**request, "stream": True}))
    await until(lambda: fake.steps >= 3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await whole)["code"] == "shutting_down"
    *chunks, last = events(await streamed)
    assert chunks
    assert last["error"]["code"] == "shutting_down"
    async with asyncio.timeout(5):
        assert await running.task == 0
    assert fake.aborted == 3


async def test_a_second_signal_ends_at_once(fake: FakeEngine, start: Start) -> None:
    running = await start(drain_timeout=60)
    fake.paused = True
    waiting = asyncio.create_task(running.client.post("/v1/completions", json={"prompt": "x"}))
    await until(lambda: bool(fake.seen))
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.15)
    assert not running.task.done()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(3):
        await running.task
    response = await waiting
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")


async def test_the_engines_death_ends_the_server(fake: FakeEngine, start: Start) -> None:
    running = await start()
    fake.step_seconds, fake.tokens_per_step = 0.02, 1
    request = {"prompt": "go on and on", "max_tokens": 400}
    whole = asyncio.create_task(refused(running.client, 503, **request, n=2))
    streamed = asyncio.create_task(running.client.post("/v1/completions", json={**request, "stream": True}))
    await until(lambda: fake.steps >= 3)
    fake.die()
    assert (await whole)["code"] == "engine_dead"
    assert events(await streamed)[-1]["error"]["code"] == "engine_dead"
    async with asyncio.timeout(5):
        assert await running.task == 1


async def test_a_request_that_fails_in_the_engine(fake: FakeEngine, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    running = await start()
    fake.step_seconds, fake.tokens_per_step = 0.02, 1
    request = {"prompt": "go on and on", "max_tokens": 400}
    whole = asyncio.create_task(refused(running.client, 500, **request))
    streamed = asyncio.create_task(running.client.post("/v1/completions", json={**request, "stream": True}))
    await until(lambda: fake.steps >= 3)
    fake.fail()
    error = await whole
    assert error["code"] == "internal_error"
    assert "fire" not in error["message"]
    assert events(await streamed)[-1]["error"]["code"] == "internal_error"
    assert "on fire" in caplog.text
    assert (await complete(running.client, prompt="say hello", max_tokens=20))["choices"][0]["text"] == "hello"


async def test_an_address_in_use_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            bind(Settings(port=port))


async def test_nothing_that_is_sent_waits_for_the_client() -> None:
    undelayed = asyncio.get_running_loop().create_future()

    async def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        undelayed.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with bind(Settings(port=0)) as sock:
        async with await asyncio.start_server(look, sock=sock):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            assert await undelayed
            writer.close()
            await writer.wait_closed()


async def test_an_unknown_host() -> None:
    with pytest.raises(OSError, match=r"cannot listen on no\.such\.host\.invalid:1.*--host"):
        bind(Settings(host="no.such.host.invalid", port=1))


async def test_states(fake: FakeEngine) -> None:
    lifecycle = Lifecycle(fake, drain_timeout=10)
    assert not lifecycle.tick(0)
    lifecycle.admit()
    lifecycle.drain(100)
    lifecycle.drain(105)
    assert lifecycle.tick(100)

    async def forever() -> None:
        await asyncio.Event().wait()

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    flight = asyncio.create_task(lifecycle.flights.run(forever(), receive))
    await asyncio.sleep(0)
    assert not lifecycle.tick(109.9)
    assert not lifecycle.tick(110)
    await asyncio.gather(flight, return_exceptions=True)
    assert lifecycle.tick(110.1)
