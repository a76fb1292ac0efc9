"""What the checks of all clients share. Standard library alone: each client runs in an environment of its own."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = os.environ["CONFORMANCE_URL"]
KEY = os.environ["CONFORMANCE_KEY"]
MODEL = os.environ["CONFORMANCE_MODEL"]
# The folder of the served model, for clients that count tokens themselves.
FOLDER = os.environ["CONFORMANCE_FOLDER"]
SCRATCH = Path(os.environ["CONFORMANCE_SCRATCH"])

_checks: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Mark a function, or a coroutine function, as a check. It fails by raising."""
    _checks.append(function)
    return function


def main() -> None:
    """Run the checks that this script marked, one result a line."""
    for function in _checks:
        result: dict[str, str] = {"check": function.__name__, "result": "passed"}
        try:
            outcome = function()
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)
        except Exception as error:  # noqa: BLE001 - whatever a client raises is the result
            traceback.print_exc()
            result |= {"result": "failed", "reason": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)


def command(*arguments: str, **environment: str) -> str:
    """Standard output of a client's command. Raises RuntimeError with what it printed if it fails."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=SCRATCH,
        env={**os.environ, **environment},
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout
