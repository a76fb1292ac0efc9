"""How a command tells that it cannot do what it is asked: one line and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from minedraft_core.config import ConfigError
from minedraft_core.embedded import EmbeddedModelError

USAGE_ERROR = 2
"""The exit code."""


def error_line(error: Exception) -> str:
    """The line that a person reads."""
    if isinstance(error, OSError) and error.strerror:
        # Its own text would begin with the number of the error.
        return f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error.strerror}"
    return f"error: {error}"


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn what a person can put right into its line on standard error and exit code 2; anything else is a fault of the program."""
    try:
        yield
    except (ConfigError, EmbeddedModelError, OSError) as error:
        typer.echo(error_line(error), err=True)
        raise typer.Exit(USAGE_ERROR) from None
