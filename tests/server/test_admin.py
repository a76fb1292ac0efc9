"""Changing the mode over HTTP, with an engine's end of the control channel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minedraft_core.config import ConfigError, PipelineConfig
from minedraft_core.control import ControlClient, ControlServer, ModeOrder, check_order
from minedraft_core.types import Mode
from server.admin import admin_router
from server.launch import _admin_routers
from server.settings import Settings
from tests.server.conftest import Start

pytestmark = pytest.mark.asyncio(loop_scope="session")
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture
def control(tmp_path: Path) -> Iterator[tuple[ControlServer, ControlClient]]:
    address = f"ipc://{tmp_path}/control"
    server, client = ControlServer(address, lambda order: check_order(order, 4)), ControlClient(address, timeout=5)
    yield server, client
    client.close()
    server.close()


async def test_the_mode_changes(start: Start, control: tuple[ControlServer, ControlClient]) -> None:
    client = (await start(routers=(admin_router(control[1], 1000),), api_key="secret")).client
    answer = await client.post("/admin/mode", json={"mode": "sequential", "num_speculative_tokens": 2}, headers=KEY)
    assert (answer.status_code, answer.json()) == (200, {"mode": "sequential", "num_speculative_tokens": 2})
    assert control[0].take() == ModeOrder(Mode.SEQUENTIAL, 2)
    answer = await client.post("/admin/mode", json={"mode": "off"}, headers=KEY)
    assert (answer.status_code, answer.json()) == (200, {"mode": "off", "num_speculative_tokens": 0})
    assert control[0].take() == ModeOrder(Mode.OFF, 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"mode": "sequential", "num_speculative_tokens": 9}, "give 1 to 4"),
        ({"mode": "fast", "num_speculative_tokens": 1}, "fast"),
        ({"mode": "sequential"}, "give 1 to 4"),
        ({"num_speculative_tokens": 2}, "mode"),
        ({"mode": "off", "num_speculative_tokens": 0, "k": 1}, "k"),
        ({"mode": "off", "num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"mode": "off", "num_speculative_tokens": 10**30}, "num_speculative_tokens"),
        ({"mode": "sequential", "num_speculative_tokens": 2**64 - 1}, "num_speculative_tokens"),
        ({"mode": "sequential", "num_speculative_tokens": 2.5}, "num_speculative_tokens"),
        ([], "object"),
    ],
)
async def test_what_is_not_possible_is_refused(
    start: Start, control: tuple[ControlServer, ControlClient], body: object, message: str
) -> None:
    client = (await start(routers=(admin_router(control[1], 1000),), api_key="secret")).client
    answer = await client.post("/admin/mode", json=body, headers=KEY)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert control[0].take() is None


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"\xff", "application/json", 400),
        (b'{"mode": "\xff"}', "application/json", 400),
        (b"[" * 900, "application/json", 400),
        (b"", "application/json", 400),
        (b" " * 1001, "application/json", 413),
        (b"{}", "text/plain", 415),
    ],
)
async def test_what_is_no_order_is_refused(
    start: Start, control: tuple[ControlServer, ControlClient], content: bytes, kind: str, status: int
) -> None:
    client = (await start(routers=(admin_router(control[1], 1000),), api_key="secret")).client
    answer = await client.post("/admin/mode", content=content, headers={**KEY, "content-type": kind})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_key_is_needed_and_a_silent_engine_is_said(start: Start, tmp_path: Path) -> None:
    silent = ControlClient(f"ipc://{tmp_path}/nobody", timeout=0.05)
    client = (await start(routers=(admin_router(silent, 1000),), api_key="secret")).client
    order = {"mode": "off", "num_speculative_tokens": 0}
    assert (await client.post("/admin/mode", json=order)).status_code == 401
    answer = await client.post("/admin/mode", json=order, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_silent")
    silent.close()


async def test_admin_without_a_key_does_not_start() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        _admin_routers(Settings(), PipelineConfig(control_address="ipc:///tmp/x"), None)  # type: ignore[arg-type]
    assert _admin_routers(Settings(), PipelineConfig(), None) == []  # type: ignore[arg-type]
