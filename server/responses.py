"""The parts that all responses share. Encoding them is the hot path of streaming: one msgspec call a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from server.speculation import SpeculationReport

DONE = b"data: [DONE]\n\n"


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """What the completion tokens were spent on."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts: each prompt once, however many choices it has; completion tokens as delivered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, prompt: int, completion: int, reasoning: int | None = None) -> Usage:
        """Usage of `prompt` and `completion` tokens, `reasoning` of them spent on reasoning if the server can tell."""
        return cls(prompt, completion, prompt + completion, UNSET if reasoning is None else CompletionTokensDetails(reasoning))


class Metrics(msgspec.Struct, frozen=True):
    """What the client asked to be told about its own request. `speculative_decoding` is null where nothing is speculated."""

    speculative_decoding: SpeculationReport | None


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
    choices: Sequence[Choice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET
    object: str = "text_completion"


_encode = msgspec.json.Encoder().encode


def as_json(body: msgspec.Struct) -> bytes:
    """The JSON body."""
    return _encode(body)


def as_event(chunk: msgspec.Struct) -> bytes:
    """One server-sent event (WHATWG HTML, section 9.2)."""
    return b"data: " + _encode(chunk) + b"\n\n"


def json_schemas(*types: type[msgspec.Struct]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Schemas of the types and of what they name, for the OpenAPI document."""
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return list(schemas), components
