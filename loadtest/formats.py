"""The forms in which published prompts come, and the one they are brought into."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec


class FormatError(ValueError):
    """A file that is not what it should be; the message says where and what is expected."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the common format. `turns` are what the person says, the first one being the prompt."""

    id: str
    prompt: str
    turns: tuple[str, ...]
    category: str | None = None


Read = Callable[[Mapping[str, Any]], Entry | None]
"""An entry from a record of the source; None where it holds no prompt. Raises FormatError for another kind of record."""


def sharegpt(record: Mapping[str, Any]) -> Entry | None:
    """`{"id": ..., "conversations": [{"from": "human", "value": ...}, ...]}`; `user` is taken for `human` too."""
    messages = _messages(record, "conversations", "from", "value")
    return _entry(record.get("id"), [text for speaker, text in messages if speaker in ("human", "user")])


def arena(side: str) -> Read:
    """`{"question_id": ..., "conversation_a": [{"role": "user", "content": ...}, ...], ...}`, of which one side is taken."""

    def read(record: Mapping[str, Any]) -> Entry | None:
        messages = _messages(record, f"conversation_{side}", "role", "content")
        name = record.get("question_id")
        return _entry(None if name is None else f"{name}-{side}", [text for speaker, text in messages if speaker == "user"])

    return read


def spec_bench(record: Mapping[str, Any]) -> Entry | None:
    """`{"question_id": ..., "category": ..., "turns": [...]}`."""
    turns = record.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise FormatError('no list of texts under "turns"')
    return _entry(record.get("question_id"), turns, record.get("category"))


def tough(record: Mapping[str, Any]) -> Entry | None:
    """`{"question": ...}`, with a domain or category where there is one."""
    question = record.get("question")
    if not isinstance(question, str):
        raise FormatError('no text under "question"')
    return _entry(record.get("id"), [question], record.get("domain") or record.get("category"))


def read_records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The records of a JSON array, of JSON lines, or of a CSV or Parquet file (by its suffix).

    Raises FormatError where the file cannot be read.
    """
    try:
        match path.suffix.lower():
            case ".parquet":
                yield from _parquet(path)
            case ".csv":
                yield from _csv(path)
            case _:
                yield from _json(path)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from None


def _json(path: Path) -> Iterator[Mapping[str, Any]]:
    data = path.read_bytes()
    if data.lstrip()[:1] == b"[":
        try:
            records = msgspec.json.decode(data, type=list[dict[str, Any]])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise FormatError(f"{path} is no JSON array of objects: {error}") from None
        yield from records
        return
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                yield msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.MsgspecError, RecursionError) as error:
                raise FormatError(f"line {number} of {path} is no JSON object: {error}") from None


def _csv(path: Path) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            yield from csv.DictReader(file)
        except (csv.Error, UnicodeDecodeError) as error:
            raise FormatError(f"{path} is no CSV file: {error}") from None


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import duckdb
    except ModuleNotFoundError:
        message = (
            f"{path} is a Parquet file and duckdb is not installed; `make setup` installs it, elsewhere pip install 'minedraft[datasets]'"
        )
        raise FormatError(message) from None
    try:
        with duckdb.connect() as database:
            result = database.execute("select * from read_parquet(?)", [str(path)])
            columns = [column[0] for column in result.description or ()]
            while rows := result.fetchmany(1000):
                yield from (dict(zip(columns, row, strict=True)) for row in rows)
    except duckdb.Error as error:
        reason = str(error).partition("\n")[0]
        raise FormatError(f"{path} is no Parquet file: {reason}") from None


def _messages(record: Mapping[str, Any], key: str, speaker: str, text: str) -> list[tuple[str, str]]:
    messages = record.get(key)
    if not isinstance(messages, list):
        raise FormatError(f'no list under "{key}"')
    if not all(isinstance(message, dict) and isinstance(message.get(text), str) for message in messages):
        raise FormatError(f'"{key}" is no list of {{"{speaker}": ..., "{text}": ...}}')
    return [(str(message.get(speaker)), message[text]) for message in messages]


def _entry(name: object, turns: list[str], category: object = None) -> Entry | None:
    spoken = tuple(turn for turn in turns if turn.strip())
    if not spoken:
        return None
    return Entry("" if name is None else str(name), spoken[0], spoken, str(category) if category else None)
