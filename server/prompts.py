"""From the prompts of a request to token ids that fit the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from server.engine import ModelConfig, Tokenizer
from server.errors import bad_request
from server.protocol import CompletionRequest

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens that one character can span: four bytes in UTF-8.
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `offsets` are the starts of its tokens in `text`; text and offsets are set only when the request echoes."""

    token_ids: list[int]
    text: str = ""
    offsets: Sequence[int] = ()


class PromptReader:
    """Tokenises and checks prompts away from the event loop; `executor` must have one thread, as tokenizers are not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, executor: Executor) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = model.get_vocab_size()
        self._max_model_len = model.max_model_len
        self._executor = executor

    async def read(self, request: CompletionRequest, max_choices: int) -> list[Prompt]:
        """The prompts in the order given. Raises APIError for an empty one, unknown ids, too many or too long ones."""
        source = request.prompt
        texts, ids = _split(source)
        count = len(texts) + len(ids)
        if count == 0:
            raise bad_request("prompt is empty; give at least one token of text", "prompt", "empty_prompt")
        if count * request.n > max_choices:
            message = f"{count} prompts with n = {request.n} make {count * request.n} choices; at most {max_choices} are allowed"
            raise bad_request(message, "n")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._read, request, texts, ids)

    def _read(self, request: CompletionRequest, texts: list[str], ids: list[list[int]]) -> list[Prompt]:
        prompts = self._tokenise(request, texts) if texts else [self._from_ids(request, tokens) for tokens in ids]
        for index, prompt in enumerate(prompts):
            self._check_length(request, len(prompt.token_ids), index)
        return prompts

    def _tokenise(self, request: CompletionRequest, texts: list[str]) -> list[Prompt]:
        if "" in texts:
            raise bad_request("prompt is empty; give at least one token of text", "prompt", "empty_prompt")
        # Neither truncation nor a warning: the length is checked here, with the request's own limits.
        encoded = self._tokenizer(texts, add_special_tokens=request.add_special_tokens, verbose=False)
        prompts = []
        for text, token_ids in zip(texts, encoded["input_ids"], strict=True):
            kept = self._truncate(request, token_ids)
            if kept is token_ids and request.echo:
                prompts.append(Prompt(kept, text, self._offsets(request, kept, text)))
            else:
                prompts.append(self._from_kept(request, kept))
        return prompts

    def _from_ids(self, request: CompletionRequest, token_ids: list[int]) -> Prompt:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            unknown = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            message = f"prompt holds token id {unknown}; the model's ids go from 0 to {self._vocab_size - 1}"
            raise bad_request(message, "prompt", "invalid_token_id")
        return self._from_kept(request, self._truncate(request, token_ids))

    def _from_kept(self, request: CompletionRequest, token_ids: list[int]) -> Prompt:
        if not request.echo:
            return Prompt(token_ids)
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return Prompt(token_ids, text, self._offsets(request, token_ids, text))

    def _offsets(self, request: CompletionRequest, token_ids: list[int], text: str) -> Sequence[int]:
        if request.logprobs is None:
            return ()
        offsets: list[int] = []
        position, start = 0, 0
        for end in range(1, len(token_ids) + 1):
            offsets.append(position)
            piece = self._tokenizer.decode(token_ids[start:end], skip_special_tokens=False)
            if piece.endswith(_REPLACEMENT) and end - start < _LONGEST_CHARACTER:
                continue
            if text.startswith(piece, position):
                position += len(piece)
            elif text.startswith(f" {piece}", position):
                position += len(piece) + 1
            start = end
        return offsets

    def _truncate(self, request: CompletionRequest, token_ids: list[int]) -> list[int]:
        keep = request.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep == -1:
            keep = max(1, self._max_model_len - max(request.max_tokens, 1))
        return token_ids if len(token_ids) <= keep else token_ids[-keep:]

    def _check_length(self, request: CompletionRequest, length: int, index: int) -> None:
        if length == 0:
            raise bad_request(f"prompt {index} is empty; give at least one token of text", "prompt", "empty_prompt")
        check_length(length, max(request.max_tokens, 1), self._max_model_len, "prompt", "max_tokens")


def check_length(length: int, wanted: int, max_model_len: int, source: str, limit: str) -> None:
    """Raise APIError where a prompt of `length` tokens and `wanted` more do not fit; `source` and `limit` are their fields."""
    if length + wanted <= max_model_len:
        return
    raise bad_request(
        # Clients know this fault by OpenAI's words.
        f"This model's maximum context length is {max_model_len} tokens, but {length + wanted} were asked for: {length} in the prompt and"
        f" {wanted} to generate; shorten the prompt or lower {limit}",
        source if length >= max_model_len else limit,
        "context_length_exceeded",
    )


def _split(source: str | list[str] | list[int] | list[list[int]]) -> tuple[list[str], list[list[int]]]:
    if isinstance(source, str):
        return [source], []
    texts: list[str] = [item for item in source if isinstance(item, str)]
    if texts or not source:
        return texts, []
    nested = [item for item in source if isinstance(item, list)]
    return [], nested or [[item for item in source if isinstance(item, int)]]
