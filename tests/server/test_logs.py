"""What goes to standard error, and how."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from minedraft_core.feed import FeedMessage
from minedraft_core.types import DrafterRecord, Mode, ModeRecord
from server.logs import configure_logging, log_drafter
from server.settings import Settings


@pytest.fixture
def _loggers() -> Iterator[None]:
    names = ("minedraft", "uvicorn", "vllm")
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).level) for name in names}
    yield
    for name, (handlers, level) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, True
        logger.setLevel(level)


def lines(monkeypatch: pytest.MonkeyPatch, settings: Settings, fields: dict[str, object]) -> list[str]:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging(settings)
    logging.getLogger("minedraft.access").info("%s %s", "GET", "/health", extra={"fields": fields})
    try:
        int("broken")
    except ValueError:
        logging.getLogger("minedraft.server").exception("it failed")
    return stream.getvalue().splitlines()


@pytest.mark.usefixtures("_loggers")
def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    access, failure = map(json.loads, lines(monkeypatch, Settings(), {"status": 200, "client": None}))
    assert (access["level"], access["logger"], access["message"], access["status"]) == ("info", "minedraft.access", "GET /health", 200)
    assert (failure["level"], failure["message"]) == ("error", "it failed")
    assert "ValueError: invalid" in failure["exception"]


@pytest.mark.usefixtures("_loggers")
def test_text(monkeypatch: pytest.MonkeyPatch) -> None:
    access, failure, *rest = lines(monkeypatch, Settings(log_format="text"), {"status": 200, "client": None})
    assert access.endswith("INFO     minedraft.access: GET /health status=200")
    assert failure.endswith("ERROR    minedraft.server: it failed")
    assert rest[-1].startswith("ValueError: invalid")


@pytest.mark.usefixtures("_loggers")
def test_the_level_keeps_lines_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = map(json.loads, lines(monkeypatch, Settings(log_level="error"), {}))
    assert first["message"] == "it failed"


def test_the_drafters_health_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    records = [
        ModeRecord(Mode.PARALLEL, 4),
        DrafterRecord(up=True, restarted=False, reason="loaded"),
        DrafterRecord(up=False, restarted=False, reason="died", message="code -9"),
        DrafterRecord(up=True, restarted=True, reason="loaded"),
    ]
    with caplog.at_level(logging.INFO, "minedraft.drafter"):
        log_drafter(FeedMessage(0, records))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "the drafter is up"),
        ("WARNING", "the drafter is down (died): code -9; it is started anew"),
        ("INFO", "the drafter is up again"),
    ]
