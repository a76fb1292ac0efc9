"""The bodies of chat responses and of their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from server.responses import Metrics, Usage


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's text, its log-probability, and the bytes of the text; null where they are part of a character."""

    token: Annotated[str, Meta(description="its text")]
    logprob: Annotated[float, Meta(description="its log-probability")]
    bytes: Annotated[list[int] | None, Meta(description="the text's bytes; null where they are part of a character")]


class ContentLogprob(msgspec.Struct, frozen=True):
    """A generated token, and the likeliest at its position."""

    token: Annotated[str, Meta(description="its text")]
    logprob: Annotated[float, Meta(description="its log-probability")]
    bytes: Annotated[list[int] | None, Meta(description="the text's bytes; null where they are part of a character")]
    top_logprobs: Annotated[list[TokenLogprob], Meta(description="the likeliest tokens at this position")]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the generated tokens."""

    content: Annotated[list[ContentLogprob], Meta(description="one entry for each token")]
    refusal: Annotated[None, Meta(description="never set")] = None


class CalledFunction(msgspec.Struct, frozen=True):
    """A function and its arguments in JSON; in a chunk the arguments are the next part of them."""

    name: Annotated[str | UnsetType, Meta(description="the function's name")] = UNSET
    arguments: Annotated[str | UnsetType, Meta(description="its arguments as JSON; in a chunk the next part")] = UNSET


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model asks for."""

    id: Annotated[str, Meta(description="names the call in the message that answers it")]
    function: Annotated[CalledFunction, Meta(description="what is called")]
    type: Annotated[str, Meta(description="the only kind")] = "function"


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A part of a call; id, type and name come with the first."""

    index: Annotated[int, Meta(description="which call")]
    id: Annotated[str | UnsetType, Meta(description="with the first part of a call")] = UNSET
    type: Annotated[str | UnsetType, Meta(description="the only kind")] = UNSET
    function: Annotated[CalledFunction | UnsetType, Meta(description="what is called")] = UNSET


class Message(msgspec.Struct, frozen=True):
    """The model's answer."""

    role: Annotated[str, Meta(description="who speaks")]
    content: Annotated[str | None, Meta(description="the text; null where there are only tool calls")]
    refusal: Annotated[None, Meta(description="never set")] = None
    reasoning: Annotated[str | UnsetType, Meta(description="the reasoning, or the next part of it")] = UNSET
    tool_calls: Annotated[list[ToolCall] | UnsetType, Meta(description="what the model wants called")] = UNSET


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the answer."""

    role: Annotated[str | UnsetType, Meta(description="who speaks")] = UNSET
    content: Annotated[str | UnsetType, Meta(description="the next part of the text")] = UNSET
    reasoning: Annotated[str | UnsetType, Meta(description="the reasoning, or the next part of it")] = UNSET
    tool_calls: Annotated[list[ToolCallDelta] | UnsetType, Meta(description="what the model wants called")] = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: Annotated[int, Meta(description="which of the n")]
    message: Annotated[Message, Meta(description="the answer")]
    logprobs: Annotated[ChatLogprobs | None, Meta(description="if asked for")] = None
    finish_reason: Annotated[str | None, Meta(description="stop, length or tool_calls; null while the answer goes on")] = None
    stop_reason: Annotated[int | str | None, Meta(description="the stop string or token id that ended the text")] = None
    token_ids: Annotated[list[int] | UnsetType, Meta(description="if asked for")] = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """The part of an answer that a chunk carries."""

    index: Annotated[int, Meta(description="which of the n")]
    delta: Annotated[Delta, Meta(description="what is new")]
    logprobs: Annotated[ChatLogprobs | None, Meta(description="if asked for")] = None
    finish_reason: Annotated[str | None, Meta(description="stop, length or tool_calls; null while the answer goes on")] = None
    stop_reason: Annotated[int | str | None, Meta(description="the stop string or token id that ended the text")] = None
    token_ids: Annotated[list[int] | UnsetType, Meta(description="if asked for")] = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """A response."""

    id: Annotated[str, Meta(description="the id of the request")]
    created: Annotated[int, Meta(description="seconds since 1970")]
    model: Annotated[str, Meta(description="the name that was asked for")]
    choices: Annotated[Sequence[ChatChoice], Meta(description="one for each n; in a chunk one part, or none beside the usage")]
    usage: Annotated[Usage, Meta(description="token counts")]
    prompt_token_ids: Annotated[list[int] | UnsetType, Meta(description="if asked for")] = UNSET
    metrics: Annotated[Metrics | UnsetType, Meta(description="if asked for")] = UNSET
    object: Annotated[str, Meta(description="the kind of object")] = "chat.completion"


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a stream. `usage` is left out unless the client asked for it; the prompt's token ids come with the first chunk."""

    id: Annotated[str, Meta(description="the id of the request, the same in all chunks")]
    created: Annotated[int, Meta(description="seconds since 1970")]
    model: Annotated[str, Meta(description="the name that was asked for")]
    choices: Annotated[Sequence[ChatChunkChoice], Meta(description="one for each n; in a chunk one part, or none beside the usage")]
    usage: Annotated[Usage | UnsetType | None, Meta(description="token counts")] = UNSET
    prompt_token_ids: Annotated[list[int] | UnsetType, Meta(description="if asked for")] = UNSET
    metrics: Annotated[Metrics | UnsetType, Meta(description="if asked for")] = UNSET
    object: Annotated[str, Meta(description="the kind of object")] = "chat.completion.chunk"
