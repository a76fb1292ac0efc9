"""Orders to a running engine, over a real channel."""

from __future__ import annotations

from pathlib import Path

import pytest

from minedraft_core.config import ConfigError
from minedraft_core.control import ControlClient, ControlError, ControlServer, ModeOrder, NoOrders, check_order
from minedraft_core.types import Mode

PARALLEL = ModeOrder(Mode.PARALLEL, 3)


def test_an_order_is_answered_and_taken_once(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control"
    server, client = ControlServer(address, lambda order: check_order(order, 4)), ControlClient(address)
    try:
        assert server.take() is None
        assert client.set_mode(PARALLEL) == PARALLEL
        assert client.set_mode(ModeOrder(Mode.OFF, 2)) == ModeOrder(Mode.OFF, 0)
        assert server.take() == ModeOrder(Mode.OFF, 0), "the newest order counts"
        assert server.take() is None
        with pytest.raises(ConfigError, match="give 1 to 4"):
            client.set_mode(ModeOrder(Mode.SEQUENTIAL, 5))
        assert server.take() is None
        assert client.set_mode(PARALLEL) == PARALLEL, "a refusal does not end the channel"
    finally:
        client.close()
        server.close()


def test_silence_is_an_error(tmp_path: Path) -> None:
    client = ControlClient(f"ipc://{tmp_path}/nobody", timeout=0.05)
    with pytest.raises(ControlError, match="did not answer"):
        client.set_mode(PARALLEL)
    client.close()


@pytest.mark.parametrize(
    ("order", "most", "message"),
    [(PARALLEL, 0, "without a drafter"), (ModeOrder(Mode.SEQUENTIAL, 0), 4, "give 1 to 4"), (PARALLEL, 2, "give 1 to 2")],
)
def test_what_the_engine_was_not_started_for_is_refused(order: ModeOrder, most: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_order(order, most)


def test_a_mode_that_the_device_does_not_know_is_refused() -> None:
    pearl = ModeOrder(Mode.PEARL, 2)
    assert check_order(pearl, 4, Mode) == pearl
    with pytest.raises(ConfigError, match="pearl: the engine was not started for it; give one of off, sequential, parallel"):
        check_order(pearl, 4)


def test_nobody_commands() -> None:
    orders = NoOrders()
    assert orders.take() is None
    orders.close()
