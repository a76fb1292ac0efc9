"""What the containers' health check says of a server."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine
from tests.server.sse import complete, until

pytestmark = pytest.mark.asyncio(loop_scope="session")
SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "healthcheck.py"


async def check(port: int) -> int:
    process = await asyncio.create_subprocess_exec(sys.executable, str(SCRIPT), env={**os.environ, "MINEDRAFT_PORT": str(port)})
    return await process.wait()


async def test_a_guarded_server_is_healthy_until_it_drains(fake: FakeEngine, start: Start) -> None:
    running = await start(api_key=["secret"])
    running.client.headers["Authorization"] = "Bearer secret"
    fake.paused = True
    work = asyncio.create_task(complete(running.client, prompt="say goodbye"))
    await until(lambda: len(fake.seen) == 1)
    assert await check(running.port) == 0
    running.lifecycle.drain(time.monotonic())
    assert await check(running.port) == 1
    fake.paused = False
    await work


async def test_nothing_there_is_not_healthy(unused_tcp_port: int) -> None:
    assert await check(unused_tcp_port) == 1
