"""The bodies of completion responses. Encoding them is the hot path of streaming: one msgspec call a chunk."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct, frozen=True):
    """Token counts: each prompt once, however many choices it has; completion tokens as delivered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, completion: int) -> Usage:
        """Usage of `prompt` and `completion` tokens."""
        return cls(prompt, completion, prompt + completion)


class Logprobs(msgspec.Struct, frozen=True):
    """Per token: its text, its log-probability, the alternatives', and where its text starts in the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class Choice(msgspec.Struct, frozen=True):
    """One completion, or the part of it that a chunk carries."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """A response, or one chunk of a stream. `usage` is left out of chunks unless the client asked for it."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


_encode = msgspec.json.Encoder().encode


def as_json(completion: Completion) -> bytes:
    """The JSON body."""
    return _encode(completion)


def as_event(completion: Completion) -> bytes:
    """One server-sent event (WHATWG HTML, section 9.2)."""
    return b"data: " + _encode(completion) + b"\n\n"


def json_schema() -> tuple[dict[str, Any], dict[str, Any]]:
    """Schema of `Completion` and of the types it names, for the OpenAPI document."""
    (schema,), components = msgspec.json.schema_components([Completion], ref_template="#/components/schemas/{name}")
    return schema, components
