"""Signals that ask a process to end."""

from __future__ import annotations

import signal
from typing import NoReturn


def end_on(*numbers: signal.Signals) -> None:
    """Let these signals unwind the process, so that its engine ends with it."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
