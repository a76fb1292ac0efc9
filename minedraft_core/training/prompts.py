"""Prompts of a file, to train on or to evaluate on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minedraft_core.config import ConfigError

_CATEGORY = "prompts"


@dataclass(frozen=True)
class Question:
    """A user's turn, and what kind it is of."""

    words: str
    category: str = _CATEGORY


def read_prompts(path: Path) -> list[Question]:
    """User turns from a file: plain lines, or JSON lines with `prompt` or `turns` (whose first is taken) and perhaps a `category`.

    Raises ConfigError that names the file and the line.
    """
    try:
        # Other characters that end a line for Python may stand inside a JSON string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8: {error}") from None
    found = [_question(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ConfigError(f"{path} holds no prompts; give one a line")
    return found


def _question(path: Path, number: int, line: str) -> Question:
    if not line.lstrip().startswith("{"):
        return Question(line.rstrip("\r"))
    try:
        entry: dict[str, Any] = json.loads(line)
        words = entry["prompt"] if "prompt" in entry else entry["turns"][0]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: give plain text or a JSON object with 'prompt' or 'turns' ({error})") from None
    category = entry.get("category", _CATEGORY)
    if not isinstance(words, str) or not isinstance(category, str):
        raise ConfigError(f"{path}, line {number}: prompt and category must be text")
    if any("\ud800" <= letter <= "\udfff" for letter in words):
        raise ConfigError(f"{path}, line {number}: the prompt has half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return Question(words, category)
