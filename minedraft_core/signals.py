"""The signal that asks a process to end."""

from __future__ import annotations

import signal
from typing import NoReturn


def end_on_sigterm() -> None:
    """Let SIGTERM unwind the process, so that its engine ends with it."""

    def end(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
