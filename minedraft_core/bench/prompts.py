"""The prompts of a benchmark, one JSON object a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from minedraft_core.config import ConfigError

SHIPPED = Path(__file__).with_name("prompts.jsonl")
"""64 questions of Spec-Bench (GitHub: hemingkx/Spec-Bench, Apache-2.0)."""

_Prompt = TypeVar("_Prompt")


class _Line(msgspec.Struct, frozen=True):
    prompt: str | None = None
    turns: list[str] | None = None

    @property
    def text(self) -> str | None:
        return self.prompt or (self.turns[0] if self.turns else None)


def read_prompts(path: Path = SHIPPED) -> list[str]:
    """The prompts of a file: `{"prompt": ...}`, or Spec-Bench's `{"turns": [...]}`, of which the first turn is taken.

    Raises ConfigError for a file that cannot be read, a line of another form, and a file without prompts.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error.strerror}") from None
    prompts = [_read_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts: {path} holds no prompt")
    return prompts


def _read_line(path: Path, number: int, line: bytes) -> str:
    try:
        text = msgspec.json.decode(line, type=_Line).text
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"--prompts: line {number} of {path} cannot be read: {error}") from None
    if not text:
        raise ConfigError(f'--prompts: line {number} of {path} holds no prompt; give {{"prompt": "..."}} or {{"turns": ["..."]}}')
    return text


def deal(prompts: Sequence[_Prompt], concurrency: int, run: int) -> list[_Prompt]:
    """The prompts of one run: run after run goes on where the last one stopped, and begins again at the end of the list."""
    return [prompts[(run * concurrency + index) % len(prompts)] for index in range(concurrency)]
