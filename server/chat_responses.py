"""The bodies of chat responses and of their chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from server.responses import Metrics, Usage


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's text, its log-probability, and the bytes of the text; null where they are part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct, frozen=True):
    """A generated token, and the likeliest at its position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the generated tokens."""

    content: list[ContentLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """A function and its arguments in JSON; in a chunk the arguments are the next part of them."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model asks for."""

    id: str
    function: CalledFunction
    type: str = "function"


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A part of a call; id, type and name come with the first."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction | UnsetType = UNSET


class Message(msgspec.Struct, frozen=True):
    """The model's answer."""

    role: str
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """The part of an answer that a chunk carries."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """A response."""

    id: str
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
    object: str = "chat.completion"


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a stream. `usage` is left out unless the client asked for it; the prompt's token ids come with the first chunk."""

    id: str
    created: int
    model: str
    choices: Sequence[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
    object: str = "chat.completion.chunk"
