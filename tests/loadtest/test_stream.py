from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from loadtest.clock import Clock
from loadtest.sample import seconds_of
from loadtest.stream import AnswerError, Transcript, refusal

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}


class Ticks(Clock):
    """A second passes each time it is asked."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1
        return self._now


class Body:
    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = iter(lines)

    def readline(self, sep: bytes = b"\n") -> bytes:
        return next(self._lines, b"")


def read(*events: dict[str, Any] | bytes, most: int | None = None) -> tuple[Transcript, bool]:
    lines = [event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n" for event in events]
    transcript = Transcript(Ticks())
    return transcript, transcript.read(Body(lines), most)


def text(words: str = "a", finish: str | None = None) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "text": words, "finish_reason": finish}], "usage": None}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": finish}]}


def test_completions() -> None:
    found, whole = read(text(), b"\n", text(), text("", "stop"), USAGE, b"data: [DONE]\n")
    assert whole
    assert (found.first, found.last_delivery, found.last, found.deliveries) == (1, 2, 3, 2)
    assert found.usage == (7, 5)
    ((bucket, count),) = found.gaps.items()
    assert (seconds_of(bucket), count) == (pytest.approx(1, rel=0.01), 1)


@pytest.mark.parametrize(("tokens", "first"), [(1, 1), (0, None)])
def test_a_first_token_that_ends_the_output_unseen_comes_with_its_end(tokens: int, first: int | None) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}}
    found, _ = read(text("", "stop"), usage, b"data: [DONE]\n")
    assert (found.first, found.last, found.deliveries) == (first, 1, 0)


def test_the_role_of_a_chat_is_no_token_but_reasoning_and_tools_are() -> None:
    events = [
        delta(role="assistant", content=""),
        delta(reasoning="hm"),
        delta(tool_calls=[{"index": 0}]),
        delta(content="a"),
        delta("stop"),
    ]
    found, _ = read(*events, USAGE, b"data: [DONE]\r\n")
    assert (found.first, found.deliveries, found.last) == (2, 3, 5)


def test_a_token_without_text_is_one() -> None:
    found, _ = read(text(""), text("a"), text("", "length"), USAGE, b"data: [DONE]\n")
    assert (found.first, found.deliveries, found.last) == (1, 2, 3)
    events = [delta(role="assistant", content=""), delta(content=""), delta(content="a"), delta("stop", content="")]
    found, _ = read(*events, USAGE, b"data: [DONE]\n")
    assert (found.first, found.deliveries, found.last) == (2, 2, 4)


def test_comments_and_further_fields_are_passed_over() -> None:
    found, _ = read(b": ping\n", b"event: message\n", {**text(), "system_fingerprint": "f"}, USAGE, b"data:[DONE]\n")
    assert found.deliveries == 1


def test_a_client_that_leaves_reads_no_further() -> None:
    found, whole = read(text(), text(), text(), most=2)
    assert not whole
    assert found.deliveries == 2


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([text()], "broke off"),
        ([text(), b"data: [DONE]\n"], "no usage"),
        ([text(), {"error": {"message": "the engine died", "code": 500}}], "error in the stream: the engine died"),
        ([text(), {"error": "the engine died"}], "error in the stream: the engine died"),
        ([b"data: {oh\n"], "cannot be read"),
        ([b'data: {"a":' + b"[" * 100_000 + b"\n"], "cannot be read"),
        ([text(), {"usage": {"prompt_tokens": 7}}], "missing required field `completion_tokens`"),
        ([text(), {"usage": {"prompt_tokens": 7, "completion_tokens": -5}}], "cannot be read"),
        ([text(), {"usage": {"prompt_tokens": 7, "completion_tokens": 0}}, b"data: [DONE]\n"], "usage counts no output token"),
    ],
)
def test_what_is_no_whole_answer(events: list[Any], message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        read(*events)


def test_refusals_in_one_line() -> None:
    assert refusal(503, b'{"error": {"message": "full", "type": "x"}}') == "HTTP 503: full"
    assert refusal(503, b'{"error": "full"}') == "HTTP 503: full"
    assert refusal(502, b"<html>bad gateway") == "HTTP 502: <html>bad gateway"
