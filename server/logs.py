"""Log lines on standard error: JSON objects for collectors, or text for people."""

from __future__ import annotations

import logging
import logging.config
from datetime import UTC, datetime

import msgspec

from minedraft_core.feed import FeedMessage
from minedraft_core.types import DrafterRecord
from minedraft_core.vllm.logs import TellingLines
from server.settings import Settings

_drafter = logging.getLogger("minedraft.drafter")


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and what a record carries in `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """Time, level, logger and message, then what a record carries in `fields` as `key=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-8s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line without a traceback."""
        fields = getattr(record, "fields", {})
        return " ".join([super().formatMessage(record), *(f"{key}={value}" for key, value in fields.items() if value is not None)])


def log_drafter(message: FeedMessage) -> None:
    """A feed sink that logs every change in the drafter's health."""
    for record in message.records:
        if not isinstance(record, DrafterRecord):
            continue
        if record.up:
            _drafter.info("the drafter is up%s", " again" if record.restarted else "")
        else:
            _drafter.warning("the drafter is down (%s): %s; it is started anew", record.reason, record.message)


def configure_logging(settings: Settings) -> None:
    """Send the server's, uvicorn's and the pipeline's logs to standard error, and vLLM's until it has a format of its own."""
    level = settings.log_level.upper()
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": JsonFormatter}, "text": {"()": TextFormatter}},
            "filters": {"telling": {"()": TellingLines}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": settings.log_format, "filters": ["telling"]}},
            "loggers": {
                "minedraft": {"handlers": ["stderr"], "level": level, "propagate": False},
                "vllm": {"handlers": ["stderr"], "level": logging.WARNING, "propagate": False},
                "uvicorn": {
                    "handlers": ["stderr"],
                    "level": max(logging.WARNING, logging.getLevelNamesMapping()[level]),
                    "propagate": False,
                },
            },
        }
    )
