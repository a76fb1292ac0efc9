"""Log lines as JSON objects on standard error, for people and collectors alike."""

from __future__ import annotations

import logging
import logging.config
from datetime import UTC, datetime

import msgspec

from server.settings import Settings


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


def configure_logging(settings: Settings) -> None:
    """Send the server's, uvicorn's and the pipeline's logs to standard error. vLLM keeps its own format."""
    level = settings.log_level.upper()
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": JsonFormatter}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
            "loggers": {
                "minedraft": {"handlers": ["stderr"], "level": level, "propagate": False},
                "uvicorn": {
                    "handlers": ["stderr"],
                    "level": max(logging.WARNING, logging.getLevelNamesMapping()[level]),
                    "propagate": False,
                },
            },
        }
    )
