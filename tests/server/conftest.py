from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import APIRouter
from prometheus_client.registry import Collector
from transformers import PreTrainedTokenizerFast

from server.app import create_app
from server.engine import Engine
from server.lifecycle import Lifecycle, bind, serve
from server.observation import Report, ignore
from server.settings import ENV_PREFIX, Settings
from tests.server.fake_engine import FakeEngine
from tests.server.scripts import make_tokenizer
from tests.server.tiny_engine import NUM_DRAFTS, start_engine, write_model


@dataclass
class Running:
    """A server on a free port of this event loop, and a client that talks to it."""

    client: httpx.AsyncClient
    lifecycle: Lifecycle
    port: int
    task: asyncio.Task[int]


Start = Callable[..., Awaitable[Running]]

SPECULATIVE = {"model": "draft", "num_speculative_tokens": NUM_DRAFTS}
_ENGINE = os.environ.get("TEST_ENGINE", "fake")


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest_asyncio.fixture(loop_scope="session")
async def fake(tokenizer: PreTrainedTokenizerFast) -> AsyncIterator[FakeEngine]:
    """A fresh scripted engine, for tests that set the script or look inside. At the end nothing may be left in it."""
    engine = FakeEngine(tokenizer)
    yield engine
    for _ in range(100):
        if not engine.unfinished:
            break
        await asyncio.sleep(0.01)
    engine.shutdown()
    assert engine.unfinished == 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a real engine only the tests run that hold for every engine: they take `client`, and neither `fake` nor `start`."""
    if _ENGINE != "fake":
        items[:] = [item for item in items if "client" in _fixtures(item) and {"fake", "start"}.isdisjoint(_fixtures(item))]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_engine(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """The scripted engine, or vLLM in the mode that TEST_ENGINE names."""
    engine: Engine
    if _ENGINE == "fake":
        engine = FakeEngine(tokenizer)
    else:
        folder = tmp_path_factory.mktemp("model")
        write_model(folder)
        engine = start_engine(folder, _ENGINE)
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    engine: Engine = request.getfixturevalue("fake" if _is_own(request) else "shared_engine")
    return engine


@pytest.fixture
def client(request: pytest.FixtureRequest) -> httpx.AsyncClient:
    """A client of a server with default settings: of an own one over `fake` where the test takes that, else of the shared one."""
    client: httpx.AsyncClient = request.getfixturevalue("own_client" if _is_own(request) else "shared_client")
    return client


@pytest_asyncio.fixture(loop_scope="session")
async def own_client(start: Start) -> httpx.AsyncClient:
    return (await start()).client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_client(shared_engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(shared_engine) as start:
        yield (await start()).client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def guarded_client(shared_engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a key of a server that has three."""
    async with serving(shared_engine) as start:
        yield (await start(api_key=["sk-1", "sk-2", "schlüssel"])).client


@pytest_asyncio.fixture(loop_scope="session")
async def start(fake: FakeEngine) -> AsyncIterator[Start]:
    """Starts servers over `fake`; keywords are settings."""
    async with serving(fake) as start:
        yield start


def _is_own(request: pytest.FixtureRequest) -> bool:
    return not {"fake", "start"}.isdisjoint(request.fixturenames)


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start(
            *, registries: tuple[Collector, ...] = (), routers: tuple[APIRouter, ...] = (), report: Report = ignore, **values: Any
        ) -> Running:
            settings = Settings(**{"port": 0, "served_model_name": ["served", "alias"], "speculative_config": SPECULATIVE, **values})
            lifecycle = Lifecycle(engine, settings.drain_timeout)
            app = create_app(engine, settings, lifecycle=lifecycle, registries=registries, routers=routers, report=report)
            sock = bind(settings)
            port = sock.getsockname()[1]
            task = asyncio.create_task(serve(app, lifecycle, settings, sock))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30))
            stack.push_async_callback(_stop, lifecycle, task)
            async with asyncio.timeout(10):
                while not await _listens(port):  # noqa: ASYNC110 - uvicorn signals nothing
                    await asyncio.sleep(0.005)
            return Running(client, lifecycle, port, task)

        yield start


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def _stop(lifecycle: Lifecycle, task: asyncio.Task[int]) -> None:
    lifecycle.drain(float("-inf"))
    async with asyncio.timeout(10):
        await task
