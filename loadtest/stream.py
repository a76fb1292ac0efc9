"""Reads one streamed answer, event by event, and notes when each came."""

from __future__ import annotations

from typing import Protocol

import msgspec

from loadtest.clock import Clock
from loadtest.sample import bucket_of
from minedraft_core.types import Count

_DONE = b"[DONE]"


class AnswerError(Exception):
    """An answer that is an error, breaks off, or lacks what is measured; the message says which."""


class Lines(Protocol):
    """An answer's body, line by line."""

    def readline(self, sep: bytes = ...) -> bytes:
        """The next line with its end; empty at the end of the body."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def delivers(self) -> bool:
        """Whether it brings a token: text, also an empty one, where a token is no whole character or is not shown; reasoning; a tool call.

        The announcement of the role brings none, nor does what only ends the output.
        """
        delta = self.delta
        if delta is None:
            return bool(self.text) or (self.text is not None and self.finish_reason is None)
        if delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls:
            return True
        return delta.content is not None and delta.role is None and self.finish_reason is None


class _Usage(msgspec.Struct):
    prompt_tokens: Count
    completion_tokens: Count


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


class _Refusal(msgspec.Struct):
    error: _Error | str


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_refusal = msgspec.json.Decoder(_Refusal).decode


class Transcript:
    """What has come of one answer so far. Times are those of the clock, in seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.first: float | None = None
        self.last_delivery: float | None = None
        self.last: float | None = None
        self.end: float | None = None
        self.deliveries = 0
        self.gaps: dict[int, int] = {}
        self.usage: tuple[int, int] | None = None

    def read(self, lines: Lines, most_deliveries: int | None = None) -> bool:
        """Read to the end of the stream, True; or until so many events brought tokens, False.

        Raises AnswerError for an error in the stream, one that breaks off, and one without token counts.
        """
        while line := lines.readline(b"\n"):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == _DONE:
                if self.usage is None:
                    raise AnswerError("the stream has no usage: the server has to know stream_options.include_usage")
                if self.deliveries and not self.usage[1]:
                    raise AnswerError("usage counts no output token, though the stream brought some")
                if self.first is None and self.usage[1]:
                    # The one token is not shown: it came with the event that ends the output.
                    self.first = self.last
                self.end = self._clock.now()
                return True
            self._take(data)
            if most_deliveries is not None and self.deliveries >= most_deliveries:
                self.end = self._clock.now()
                return False
        raise AnswerError("the stream broke off")

    def _take(self, data: bytes) -> None:
        now = self._clock.now()
        try:
            event = _decode_event(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise AnswerError(f"an event of the stream cannot be read: {error}") from None
        if event.error is not None:
            raise AnswerError(f"error in the stream: {_words(event.error)}")
        if event.usage is not None:
            self.usage = event.usage.prompt_tokens, event.usage.completion_tokens
        for choice in event.choices:
            if choice.delivers:
                self.last = now
                self.deliveries += 1
                if self.last_delivery is None:
                    self.first = now
                else:
                    bucket = bucket_of(now - self.last_delivery)
                    self.gaps[bucket] = self.gaps.get(bucket, 0) + 1
                self.last_delivery = now
            elif choice.finish_reason is not None:
                self.last = now


def refusal(status: int, body: bytes) -> str:
    """One line about an answer with an error status."""
    try:
        message = _words(_decode_refusal(body).error)
    except (msgspec.MsgspecError, RecursionError):
        message = body[:200].decode("utf-8", "replace")
    return f"HTTP {status}: {message}"


def _words(error: _Error | str) -> str:
    return error if isinstance(error, str) else error.message
