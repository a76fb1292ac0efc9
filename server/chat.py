"""POST /v1/chat/completions: from the request's body to a job, and from the engine's outputs to OpenAI's messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET, UnsetType
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.renderers.chat_utils import make_tool_call_id

from server.chat_protocol import ChatRequest, NamedTool
from server.chat_responses import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Message,
    ToolCall,
    ToolCallDelta,
)
from server.detokenizing import TokenTexts
from server.engine import Engine, Tokenizer
from server.logprobs import ChatLogprobWriter
from server.parsing import DeltaParser, takes_blocks
from server.prompts import Prompt, check_length
from server.rendering import ChatRenderer, Rendered
from server.responses import Metrics, Usage
from server.runner import Form, Writer, openai_reason
from server.sampling import ServingParams, build_params
from server.service import Call, Plan


class ChatEndpoint:
    """Plans chats. `defaults` are the model's own sampling parameters."""

    prefix = "chatcmpl"

    def __init__(self, engine: Engine, renderer: ChatRenderer) -> None:
        self._tokenizer: Tokenizer = engine.get_tokenizer()
        self._renderer = renderer
        self._max_model_len: int = engine.model_config.max_model_len
        self._defaults: dict[str, Any] = engine.model_config.get_diff_sampling_param()

    def parse(self, body: bytes) -> ChatRequest:
        """Read the body. Raises APIError."""
        return ChatRequest.parse(body)

    async def plan(self, request: ChatRequest, call: Call) -> Plan:
        """The job and the form of its answer. Raises APIError or vLLM's client errors."""
        rendered = await self._renderer.render(request.for_vllm())
        if request.truncate_prompt_tokens == -1:
            # vLLM leaves no room for what is to be generated.
            room = max(1, self._max_model_len - (request.limit or 1))
            rendered = replace(rendered, prompt=Prompt(rendered.prompt.token_ids[-room:]))
        params = build_params(
            request,
            self._defaults,
            max_tokens=self._max_tokens(request, len(rendered.prompt.token_ids)),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            # Parsers change these two.
            structured_outputs=rendered.request.extract_structured_outputs(),
            skip_special_tokens=rendered.request.skip_special_tokens,
        )
        job = call.job(request, [rendered.prompt], params, self._renderer.reasoning(rendered))
        chat = _Chat(call, int(time.time()), request, rendered, self._renderer, self._tokenizer, params)
        form: Form = _DeltaForm(chat) if request.stream else _MessageForm(chat)
        return Plan(job, form)

    def _max_tokens(self, request: ChatRequest, length: int) -> int:
        check_length(length, request.limit or 1, self._max_model_len, "messages", "max_completion_tokens")
        room = self._max_model_len - length
        return request.limit or min(room, self._defaults.get("max_tokens") or room)


@dataclass(frozen=True, slots=True)
class _Chat:
    call: Call
    created: int
    request: ChatRequest
    rendered: Rendered
    renderer: ChatRenderer
    tokenizer: Tokenizer
    params: ServingParams

    @property
    def role(self) -> str:
        return self.renderer.role if self.request.add_generation_prompt else self.rendered.last[0]

    @property
    def echoed(self) -> str:
        role, text = self.rendered.last
        return text if self.request.echo and role == self.role else ""

    @property
    def prompt_token_ids(self) -> list[int] | UnsetType:
        return self.rendered.prompt.token_ids if self.request.return_token_ids else UNSET


class _ChoiceWriter:
    """What messages and deltas have in common."""

    def __init__(self, chat: _Chat, index: int) -> None:
        request = chat.request
        self._chat = chat
        self._request = request
        self._index = index
        self._parser = chat.renderer.parser(chat.rendered)
        # What the parser hides must not come out through the tokens.
        self._hides = self._parser is not None and not request.include_reasoning
        prompt = chat.rendered.prompt.token_ids
        wanted = request.logprobs and not self._hides
        self._logprobs = ChatLogprobWriter(chat.tokenizer, prompt, request.top_logprobs or 0) if wanted else None
        self._tools_called = False
        self._token_ids: list[int] = []
        self.delivered = 0

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far; none where nothing tells reasoning apart."""
        if self._parser is None or self._parser.reasoning_parser is None:
            return None
        return self._parser.count_reasoning_tokens(self._token_ids)

    def _take(self, completion: CompletionOutput) -> ChatLogprobs | None:
        self.delivered += len(completion.token_ids)
        if self._parser is not None and self._parser.reasoning_parser is not None:
            self._token_ids += completion.token_ids
        return None if self._logprobs is None else self._logprobs.tokens(completion.token_ids, completion.logprobs or ())

    def _shown_ids(self, completion: CompletionOutput) -> list[int] | UnsetType:
        return list(completion.token_ids) if self._request.return_token_ids and not self._hides else UNSET

    def _reason(self, reason: str | None) -> str | None:
        """OpenAI says "tool_calls" where the model chose to call, and "stop" where it was told which function to call."""
        if reason == "stop" and self._tools_called and not isinstance(self._request.tool_choice, NamedTool):
            return "tool_calls"
        return openai_reason(reason)


class _MessageForm:
    def __init__(self, chat: _Chat) -> None:
        self._chat = chat

    def writer(self, index: int) -> Writer:
        return _MessageWriter(self._chat, index)

    def envelope(self, choices: Sequence[Any], usage: Any, metrics: Metrics | UnsetType = UNSET) -> ChatCompletion:
        chat = self._chat
        return ChatCompletion(chat.call.id, chat.created, chat.call.model, choices, usage, chat.prompt_token_ids, metrics)


class _MessageWriter(_ChoiceWriter):
    def write(self, output: RequestOutput) -> tuple[ChatChoice]:
        completion = output.outputs[0]
        logprobs = self._take(completion)
        choice = ChatChoice(
            index=self._index,
            message=self._message(completion),
            logprobs=logprobs,
            finish_reason=self._reason(completion.finish_reason),
            stop_reason=completion.stop_reason,
            token_ids=self._shown_ids(completion),
        )
        return (choice,)

    def _message(self, completion: CompletionOutput) -> Message:
        chat, request = self._chat, self._request
        if self._parser is None:
            return Message(chat.role, chat.echoed + completion.text)
        self._parser.set_prompt_token_ids(chat.rendered.prompt.token_ids)
        reasoning, content, calls = self._parser.parse(
            completion.text,
            chat.rendered.request,
            enable_auto_tools=chat.renderer.auto_tools,
            model_output_token_ids=completion.token_ids,
        )
        tool_calls = [
            ToolCall(call.id or make_tool_call_id(), CalledFunction(call.name, call.arguments))
            for call in (calls or ())[: None if request.parallel_tool_calls else 1]
        ]
        self._tools_called = bool(tool_calls)
        return Message(
            chat.role,
            chat.echoed + content if content is not None else chat.echoed or None,
            reasoning=UNSET if reasoning is None or not request.include_reasoning else reasoning,
            tool_calls=tool_calls or UNSET,
        )


class _DeltaForm:
    def __init__(self, chat: _Chat) -> None:
        self._chat = chat
        self._first = True

    def writer(self, index: int) -> Writer:
        return _DeltaWriter(self._chat, index)

    def envelope(self, choices: Sequence[Any], usage: Usage | UnsetType | None, metrics: Metrics | UnsetType = UNSET) -> ChatChunk:
        chat = self._chat
        prompt_token_ids = chat.prompt_token_ids if self._first else UNSET
        self._first = False
        return ChatChunk(chat.call.id, chat.created, chat.call.model, choices, usage, prompt_token_ids, metrics)


class _DeltaWriter(_ChoiceWriter):
    def __init__(self, chat: _Chat, index: int) -> None:
        super().__init__(chat, index)
        self._begun = False
        self._deltas = None if self._parser is None else self._delta_parser(self._parser)

    def write(self, output: RequestOutput) -> list[ChatChunkChoice]:
        """The role comes in a chunk of its own, as OpenAI sends it; a step of which the parser shows nothing makes no chunk."""
        completion = output.outputs[0]
        parts = [] if self._begun else self._beginning()
        logprobs = self._take(completion)
        token_ids = self._shown_ids(completion)
        reason = completion.finish_reason
        delta = Delta(content=completion.text) if self._deltas is None else self._parsed(self._deltas.feed(completion))
        if delta is None and (reason is not None or logprobs is not None or token_ids is not UNSET):
            delta = Delta()
        if delta is not None:
            parts.append(
                ChatChunkChoice(
                    index=self._index,
                    delta=delta,
                    logprobs=logprobs,
                    finish_reason=self._reason(reason),
                    stop_reason=completion.stop_reason,
                    token_ids=token_ids,
                )
            )
        return parts

    def _beginning(self) -> list[ChatChunkChoice]:
        self._begun = True
        return [ChatChunkChoice(self._index, Delta(role=self._chat.role, content=self._chat.echoed))]

    def _delta_parser(self, parser: Parser) -> DeltaParser:
        chat = self._chat
        prompt = chat.rendered.prompt.token_ids
        texts = None if takes_blocks(parser) else TokenTexts(chat.tokenizer, prompt, chat.params)
        return DeltaParser(parser, chat.rendered.request, prompt, texts)

    def _parsed(self, message: DeltaMessage | None) -> Delta | None:
        if message is None:
            return None
        tool_calls = self._tool_calls(message)
        self._tools_called = self._tools_called or bool(tool_calls)
        return Delta(
            content=UNSET if message.content is None else message.content,
            reasoning=UNSET if message.reasoning is None else message.reasoning,
            tool_calls=tool_calls or UNSET,
        )

    def _tool_calls(self, message: DeltaMessage) -> list[ToolCallDelta]:
        return [
            ToolCallDelta(
                index=call.index,
                id=UNSET if call.id is None else call.id,
                type=UNSET if call.type is None else call.type,
                function=UNSET
                if call.function is None
                else CalledFunction(_or_unset(call.function.name), _or_unset(call.function.arguments)),
            )
            for call in message.tool_calls
            if self._request.parallel_tool_calls or call.index == 0
        ]


def _or_unset(value: str | None) -> str | UnsetType:
    return UNSET if value is None else value
