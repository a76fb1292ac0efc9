"""POST /tokenize and /detokenize: what the model reads, for a text or a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.inputs import TokensPrompt

from server.chat_protocol import Messages, Tool, as_vllm
from server.engine import Engine
from server.errors import bad_request, from_engine
from server.protocol import Body, read_object
from server.rendering import ChatRenderer
from server.routes import ERRORS, json_body
from server.service import check_model, read_body


class TokenizeBody(Body):
    """The body of POST /tokenize: a prompt, or messages."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"examples": [{"prompt": "Once upon"}, {"messages": [{"role": "user", "content": "Hi"}]}]}
    )

    model: str | None = Field(default=None, description="a served name; without one, the first")
    prompt: str | None = Field(default=None, description="the text")
    messages: Messages | None = Field(default=None, description="the conversation, in OpenAI's form; in place of a prompt")
    add_special_tokens: bool | None = Field(
        default=None, description="put the model's own first token before the text; default true for a prompt, false for messages"
    )
    return_token_strs: bool = Field(default=False, description="return the tokens' own strings too")
    add_generation_prompt: bool = Field(default=True, description="let the template begin the assistant's turn")
    continue_final_message: bool = Field(default=False, description="leave the last message open; needs add_generation_prompt: false")
    chat_template: str | None = Field(default=None, description="a Jinja template; only with --trust-request-chat-template")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="further variables of the chat template")
    tools: list[Tool] | None = Field(default=None, description="functions that the template shows")


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"tokens": [12, 34]}]})

    model: str | None = Field(default=None, description="a served name; without one, the first")
    tokens: list[int] = Field(description="token ids")


class TokenizeAnswer(BaseModel):
    """The answer of POST /tokenize."""

    tokens: list[int] = Field(description="the token ids")
    token_strs: list[str] | None = Field(description="the tokens' own strings, if asked for")
    count: int = Field(description="number of tokens")
    max_model_len: int = Field(description="tokens that prompt and answer may have together")


class DetokenizeAnswer(BaseModel):
    """The answer of POST /detokenize."""

    prompt: str = Field(description="the text")


Read = TypeVar("Read", TokenizeBody, DetokenizeBody)


class Tokenization:
    """Both directions, on vLLM's renderer."""

    def __init__(self, engine: Engine, renderer: ChatRenderer) -> None:
        self._model_config = engine.model_config
        self._renderer = engine.renderer
        self._chat = renderer

    async def tokenize(self, body: TokenizeBody) -> TokenizeAnswer:
        """Token ids of the prompt. Raises APIError or vLLM's client errors."""
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is None:
            token_ids = await self._text(body)
        else:
            token_ids = await self._conversation(body)
        strings = self._renderer.get_tokenizer().convert_ids_to_tokens(token_ids) if body.return_token_strs else None
        return TokenizeAnswer(tokens=token_ids, token_strs=strings, count=len(token_ids), max_model_len=self._model_config.max_model_len)

    async def _text(self, body: TokenizeBody) -> list[int]:
        request = TokenizeCompletionRequest(prompt=body.prompt, add_special_tokens=body.add_special_tokens is not False)
        return await self._chat.text_tokens(request) if request.prompt else []

    async def _conversation(self, body: TokenizeBody) -> list[int]:
        fields = body.model_dump(exclude_none=True, exclude={"prompt", "model"})
        return await self._chat.conversation_tokens(as_vllm(TokenizeChatRequest, fields))

    async def detokenize(self, body: DetokenizeBody) -> DetokenizeAnswer:
        """Text of the token ids, special tokens included. Raises APIError for unknown ids."""
        size = self._model_config.get_vocab_size()
        unknown = next((token for token in body.tokens if not 0 <= token < size), None)
        if unknown is not None:
            raise bad_request(f"tokens holds the id {unknown}; the model's ids go from 0 to {size - 1}", "tokens", "invalid_token_id")
        if not body.tokens:
            return DetokenizeAnswer(prompt="")
        params = DetokenizeRequest(tokens=body.tokens).build_tok_params(self._model_config)
        prompt = await self._renderer.tokenize_prompt_async(TokensPrompt(prompt_token_ids=body.tokens), params)
        return DetokenizeAnswer(prompt=prompt["prompt"])


def tokenization_router(tokenization: Tokenization, models: Sequence[str], max_body_bytes: int) -> APIRouter:
    """POST /tokenize and POST /detokenize."""
    router = APIRouter()
    errors: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (400, 401, 404, 413, 415, 500)}

    async def read(kind: type[Read], http: Request) -> Read:
        body = kind.checked(read_object(await read_body(http, max_body_bytes)))
        check_model(body.model, models)
        return body

    @router.post("/tokenize", responses=errors, openapi_extra=json_body("TokenizeBody"))
    async def tokenize(request: Request) -> TokenizeAnswer:
        """Token ids of a prompt or a conversation."""
        try:
            return await tokenization.tokenize(await read(TokenizeBody, request))
        except Exception as error:
            raise from_engine(error) from error

    @router.post("/detokenize", responses=errors, openapi_extra=json_body("DetokenizeBody"))
    async def detokenize(request: Request) -> DetokenizeAnswer:
        """Text of token ids."""
        try:
            return await tokenization.detokenize(await read(DetokenizeBody, request))
        except Exception as error:
            raise from_engine(error) from error

    return router
