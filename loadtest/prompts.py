"""The prompts that a load test sends."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from loadtest.formats import FormatError, read_records, sharegpt
from loadtest.plan import Endpoint, Range
from minedraft_core.bench.prompts import read_prompts
from minedraft_core.config import ConfigError

# Ids that are ordinary tokens in the vocabularies of all larger models; special ones lie at the ends.
_TOKEN_IDS = Range(1000, 30_000)
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family")


def load_prompts(path: Path) -> list[str]:
    """The prompts of a file: lines of `{"prompt": ...}` or of Spec-Bench's `{"turns": [...]}`, or conversations as ShareGPT keeps them.

    Of several turns the first one is taken. Raises ConfigError for a file that cannot be read, and for one without prompts.
    """
    if not _is_sharegpt(path):
        return read_prompts(path)
    try:
        entries = [sharegpt(record) for record in read_records(path)]
    except FormatError as error:
        raise ConfigError(f"--prompts: {error}") from None
    prompts = [entry.prompt for entry in entries if entry is not None]
    if not prompts:
        raise ConfigError(f"--prompts: {path} holds no prompt")
    return prompts


def _is_sharegpt(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            first = file.readline().strip()
    except OSError as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error.strerror}") from None
    if first.startswith(b"["):
        return True
    try:
        record = msgspec.json.decode(first)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return isinstance(record, dict) and "conversations" in record


def dealt(prompts: Sequence[str], seed: int) -> Iterator[str]:
    """All prompts in an order that the seed sets, again and again."""
    order = list(prompts)
    random.Random(seed).shuffle(order)
    while True:
        yield from order


def synthetic(length: int, endpoint: Endpoint, draws: random.Random) -> str | list[int]:
    """A random prompt: exactly so many token ids for completions, so many short words for chat, which are about as many tokens."""
    if endpoint == "completions":
        return [draws.randint(_TOKEN_IDS.least, _TOKEN_IDS.most) for _ in range(length)]
    return " ".join(draws.choices(_WORDS, k=length))
