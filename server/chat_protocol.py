"""The body of POST /v1/chat/completions, checked field by field. vLLM's own request, made from it, goes to its renderer and parsers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from server.errors import bad_request
from server.protocol import INT32_MAX, REFUSED, Body, GenerationRequest, explain
from server.sampling import structured_outputs

MAX_TOP_LOGPROBS = 20

# What vLLM's renderers and parsers read of a request.
_RENDERED = frozenset(
    {
        "messages", "model", "stream", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning",
        "chat_template", "chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message", "add_special_tokens",
        "truncate_prompt_tokens", "skip_special_tokens",
    }
)  # fmt: skip


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"message {index} has no role; give system, developer, user, assistant or tool")
        content, calls = message.get("content"), message.get("tool_calls")
        if content is None and not (message["role"] == "assistant" and calls):
            raise ValueError(f"message {index} has no content; only an assistant's message with tool_calls may go without")
        if not (content is None or isinstance(content, str) or _are_objects(content)):
            raise ValueError(f"the content of message {index} is neither a string nor a list of parts")
        if calls is not None and not _are_objects(calls):
            raise ValueError(f"the tool_calls of message {index} are no list of objects")
    return messages


Messages = Annotated[list[dict[str, Any]], Field(min_length=1), AfterValidator(_checked_messages)]


class ToolFunction(Body):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, description="what the model calls it by")
    description: str | None = Field(default=None, description="tells the model what it does")
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments")
    strict: bool | None = Field(default=None, description="hold the arguments to their schema")


class Tool(Body):
    """A tool; only functions exist."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = Field(description="the only kind")
    function: ToolFunction = Field(description="the function")


class NamedFunction(Body):
    """The function that must be called."""

    name: str = Field(min_length=1, description="one of the tools")


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"] = Field(description="the only kind")
    function: NamedFunction = Field(description="the function")


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_completion_tokens": 64}],
        },
    )
    refused: ClassVar[Mapping[str, str]] = REFUSED | {
        "functions": "replaced by tools",
        "function_call": "replaced by tool_choice",
        "audio": "only text is generated",
        "web_search_options": "there is no web search; give what was found as a message",
        "prompt_logprobs": "not supported for chat; use POST /v1/completions with echo and logprobs",
        "mm_processor_kwargs": "only text is read",
        "media_io_kwargs": "only text is read",
        "return_prompt_text": "use return_token_ids, which returns the prompt's token ids",
    }

    messages: Messages = Field(description="the conversation so far: objects with role and content, in OpenAI's form")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=INT32_MAX, description="most tokens to generate; default: all that fit"
    )
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX, description="older name of max_completion_tokens, which wins")
    logprobs: bool = Field(default=False, description="return the log-probability of each token")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_TOP_LOGPROBS, description="the likeliest tokens at each position; only with logprobs"
    )
    modalities: list[Literal["text"]] | None = Field(default=None, description="only text")
    tools: Annotated[list[Tool], Field(min_length=1)] | None = Field(default=None, description="functions that the model may call")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None,
        description="whether to call a tool, or which; default auto with tools, for which the server needs a tool parser, else none",
    )
    parallel_tool_calls: bool = Field(default=True, description="false: at most one tool call")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="handed to the chat template"
    )

    include_reasoning: bool = Field(default=True, description="false: leave the reasoning out, and with it log-probabilities and token ids")
    chat_template: str | None = Field(
        default=None, description="a Jinja template for this request; only with --trust-request-chat-template"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="further variables of the chat template")
    documents: list[dict[str, str]] | None = Field(default=None, description="documents for templates that take them")
    add_generation_prompt: bool = Field(default=True, description="let the template begin the assistant's turn")
    continue_final_message: bool = Field(
        default=False, description="go on with the last message instead of beginning a turn; needs add_generation_prompt: false"
    )
    add_special_tokens: bool = Field(default=False, description="put the model's own first token before the template's")
    echo: bool = Field(default=False, description="begin the text with the last message if it has the answer's role")

    @property
    def limit(self) -> int | None:
        """Most tokens to generate, if the client says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check_together(self) -> None:
        """Raise APIError for fields that contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        if self.tool_choice not in (None, "none") and self.tools is None:
            raise bad_request("tool_choice needs tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools or ()]
            if self.tool_choice.function.name not in names:
                message = f"tool_choice names {self.tool_choice.function.name!r}, which is none of the tools: {', '.join(names)}"
                raise bad_request(message, "tool_choice")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request("continue_final_message needs add_generation_prompt: false", "continue_final_message")

    def for_vllm(self) -> ChatCompletionRequest:
        """The request in the form that vLLM's renderer and parsers take and change. Raises APIError for messages that they cannot read."""
        fields = self.model_dump(include=set(_RENDERED), exclude_none=True)
        if self.response_format is not None:
            fields["response_format"] = self.response_format.model_dump(by_alias=True, exclude_none=True)
        fields["structured_outputs"] = structured_outputs(self)
        return as_vllm(ChatCompletionRequest, fields)


Vllm = TypeVar("Vllm", bound=BaseModel)


def as_vllm(kind: type[Vllm], fields: dict[str, Any]) -> Vllm:
    """One of vLLM's requests. Raises APIError for messages that vLLM cannot read."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        place = error.errors(include_url=False)[0]["loc"]
        if place[:1] != ("messages",):
            raise explain(error) from None
        raise bad_request(f"message {place[1]} is not in OpenAI's form; see ChatRequest in /docs", "messages", "invalid_value") from None
