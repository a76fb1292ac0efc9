"""From a conversation to a prompt: vLLM's renderer, tool parsers and reasoning parsers, as the settings choose them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.parser.abstract_parser import Parser
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager

from minedraft_core.config import ConfigError
from server.engine import Engine
from server.errors import bad_request
from server.prompts import Prompt
from server.settings import Settings, flag

_logger = logging.getLogger("minedraft.server")
# vLLM's names for a prompt that is too long.
_LENGTHS = ("input_tokens", "input_text")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation. `request` is as the parsers left it: they may add a grammar, or show special tokens.

    `last` are role and text of the last message.
    """

    prompt: Prompt
    request: ChatCompletionRequest
    template_kwargs: Mapping[str, Any]
    last: tuple[str, str]


class ChatRenderer:
    """Renders conversations with the model's template, and makes the parsers of their answers.

    Raises ConfigError where the parsers of the settings do not fit the model.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._model_config = engine.model_config
        self._tokenizer = engine.renderer.tokenizer
        self.auto_tools = settings.enable_auto_tool_choice
        self.role = settings.response_role
        try:
            self._renderer = OnlineRenderer(
                engine.model_config,
                engine.renderer,
                request_logger=None,
                chat_template=load_template(settings),
                chat_template_content_format=settings.chat_template_content_format,
                trust_request_chat_template=settings.trust_request_chat_template,
                enable_auto_tools=settings.enable_auto_tool_choice,
                exclude_tools_when_tool_choice_none=settings.exclude_tools_when_tool_choice_none,
                tool_parser=settings.tool_call_parser,
                tool_strict_level=settings.tool_strict_level,
                reasoning_parser=engine.vllm_config.structured_outputs_config.reasoning_parser,
                default_chat_template_kwargs=settings.default_chat_template_kwargs,
            )
        except TypeError as error:
            # The parsers do not fit each other or the tokenizer.
            raise ConfigError(str(error)) from error
        # The template is looked up and compiled now; the first conversation would hold up all others for a second.
        self._renderer.warmup()

    async def text_tokens(self, request: TokenizeCompletionRequest) -> list[int]:
        """Token ids of a text. Raises APIError or vLLM's client errors."""
        (source,) = await answered(self._renderer.preprocess_completion(request, prompt_input=request.prompt, prompt_embeds=None))
        return list(source["prompt_token_ids"])

    async def conversation_tokens(self, request: TokenizeChatRequest) -> list[int]:
        """Token ids of a conversation. Raises APIError or vLLM's client errors."""
        renderer = self._renderer
        refusal = renderer.validate_chat_template(request.chat_template, request.chat_template_kwargs, renderer.trust_request_chat_template)
        if refusal is not None:
            raise bad_request(refusal.error.message, "chat_template")
        rendering = renderer.preprocess_chat(
            request,
            request.messages,
            default_template=renderer.chat_template,
            default_template_content_format=renderer.chat_template_content_format,
            default_template_kwargs=renderer.default_chat_template_kwargs,
            tool_dicts=[tool.model_dump() for tool in request.tools] if request.tools is not None else None,
        )
        _, (source,) = await answered(rendering)
        return list(source["prompt_token_ids"])

    async def render(self, request: ChatCompletionRequest) -> Rendered:
        """The prompt of a conversation. Raises APIError or vLLM's client errors for one that the model or its template cannot take."""
        conversation, (source,) = await answered(self._renderer.render_chat(request))
        token_ids = source.get("prompt_token_ids")
        if source["type"] != "token" or not token_ids:
            raise bad_request("the messages make no prompt of text; give text", "messages")
        return Rendered(
            Prompt(list(token_ids)), request, self._renderer.effective_chat_template_kwargs(request), _last_message(conversation)
        )

    def parser(self, rendered: Rendered) -> Parser | None:
        """A fresh parser for one choice, or none where text is only text."""
        if self._renderer.parser is None:
            return None
        return self._renderer.parser(
            self._tokenizer, rendered.request.tools, chat_template_kwargs=rendered.template_kwargs, model_config=self._model_config
        )

    def reasoning(self, rendered: Rendered) -> dict[str, Any]:
        """Arguments of `generate`: the engine must know where reasoning ends before it applies a grammar."""
        parser = self.parser(rendered)
        if parser is None or parser.reasoning_parser is None:
            return {}
        return {
            "reasoning_ended": rendered.request.resolve_reasoning_ended(parser, rendered.prompt.token_ids),
            "reasoning_parser_kwargs": {"chat_template_kwargs": rendered.template_kwargs},
        }


async def answered(rendering: Any) -> Any:
    """What vLLM renders, its refusals raised as the client's errors."""
    try:
        result = await rendering
    except VLLMValidationError as error:
        if error.parameter in _LENGTHS:
            raise bad_request(str(error.args[0]), "messages", "context_length_exceeded") from error
        raise
    except VLLMClientError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, NotImplementedError, RecursionError, TemplateError) as error:
        # A message may hold what neither vLLM nor the template expects: whatever comes of it is about the message.
        _logger.debug("a conversation could not be rendered", exc_info=error)
        raise bad_request(f"the messages cannot be rendered: {sanitize_message(str(error))}", "messages") from error
    if isinstance(result, ErrorResponse):
        raise bad_request(result.error.message, result.error.param)
    return result


def _last_message(conversation: Any) -> tuple[str, str]:
    last = conversation[-1] if conversation and isinstance(conversation[-1], dict) else {}
    content = last.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
    return last.get("role", ""), text


def load_template(settings: Settings) -> str | None:
    """The chat template that the settings name, a file or the template itself. Raises ConfigError."""
    try:
        return load_chat_template(settings.chat_template)
    except (VLLMClientError, ValueError, OSError) as error:
        raise ConfigError(f"--chat-template: {error.args[0]}") from None


def check_chat(settings: Settings, reasoning_parser: str) -> None:
    """Check what needs no engine, before one is loaded: the template and the names of the parsers. Raises ConfigError."""
    load_template(settings)
    if settings.tool_parser_plugin:
        ToolParserManager.import_tool_parser(settings.tool_parser_plugin)
    _check_name("tool_call_parser", settings.tool_call_parser, ToolParserManager.list_registered())
    _check_name("reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered())


def _check_name(setting: str, name: str | None, known: Sequence[str]) -> None:
    if name and name not in known:
        raise ConfigError(f"{flag(setting)}: {name!r} is not known; known are {', '.join(sorted(known))}")
