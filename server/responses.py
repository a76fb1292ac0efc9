"""The parts that all responses share. Encoding them is the hot path of streaming: one msgspec call a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from server.speculation import SpeculationReport

DONE = b"data: [DONE]\n\n"


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """What the completion tokens were spent on."""

    reasoning_tokens: Annotated[int, Meta(description="tokens of the reasoning")]


class Usage(msgspec.Struct, frozen=True):
    """Token counts: each prompt once, however many choices it has; completion tokens as delivered."""

    prompt_tokens: Annotated[int, Meta(description="tokens of all prompts")]
    completion_tokens: Annotated[int, Meta(description="tokens delivered")]
    total_tokens: Annotated[int, Meta(description="both together")]
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType, Meta(description="only where the server tells reasoning apart")
    ] = UNSET

    @classmethod
    def of(cls, prompt: int, completion: int, reasoning: int | None = None) -> Usage:
        """Usage of `prompt` and `completion` tokens, `reasoning` of them spent on reasoning if the server can tell."""
        return cls(prompt, completion, prompt + completion, UNSET if reasoning is None else CompletionTokensDetails(reasoning))


class Metrics(msgspec.Struct, frozen=True):
    """What the client asked to be told about its own request. `speculative_decoding` is null where nothing is speculated."""

    speculative_decoding: Annotated[SpeculationReport | None, Meta(description="null where nothing is speculated")]


class Logprobs(msgspec.Struct, frozen=True):
    """Per token: its text, its log-probability, the alternatives', and where its text starts in the choice's text."""

    text_offset: Annotated[list[int], Meta(description="where each token's text starts")]
    token_logprobs: Annotated[list[float | None], Meta(description="log-probabilities of the tokens")]
    tokens: Annotated[list[str], Meta(description="texts of the tokens")]
    top_logprobs: Annotated[list[dict[str, float] | None], Meta(description="the alternatives by their text")]


class Choice(msgspec.Struct, frozen=True):
    """One completion, or the part of it that a chunk carries."""

    index: Annotated[int, Meta(description="prompt times n, plus choice")]
    text: Annotated[str, Meta(description="the text, or the next part of it")]
    logprobs: Annotated[Logprobs | None, Meta(description="if asked for")] = None
    finish_reason: Annotated[str | None, Meta(description="stop or length; null while the text goes on")] = None
    stop_reason: Annotated[int | str | None, Meta(description="the stop string or token id that ended the text")] = None
    token_ids: Annotated[list[int] | UnsetType, Meta(description="if asked for")] = UNSET
    prompt_token_ids: Annotated[list[int] | UnsetType, Meta(description="if asked for, with the choice's first part")] = UNSET


class Completion(msgspec.Struct, frozen=True):
    """A response, or one chunk of a stream. `usage` is left out of chunks unless the client asked for it."""

    id: Annotated[str, Meta(description="the id of the request, the same in all chunks")]
    created: Annotated[int, Meta(description="seconds since 1970")]
    model: Annotated[str, Meta(description="the name that was asked for")]
    choices: Annotated[Sequence[Choice], Meta(description="one for each prompt and choice; in a chunk one part, or none beside the usage")]
    usage: Annotated[Usage | UnsetType | None, Meta(description="token counts")] = UNSET
    metrics: Annotated[Metrics | UnsetType, Meta(description="if asked for")] = UNSET
    object: Annotated[str, Meta(description="the kind of object")] = "text_completion"


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
