"""Log-probabilities of a choice in OpenAI's form, part by part, with offsets that go on from part to part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.logprobs import Logprob

from server.chat_responses import ChatLogprobs, ContentLogprob, TokenLogprob
from server.detokenizing import TokenTexts
from server.engine import Tokenizer
from server.prompts import Prompt
from server.responses import Logprobs

_LOWEST = -9999.0
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Positions = Sequence[Mapping[int, Logprob] | None]


class ChatLogprobWriter:
    """Writes one choice's log-probabilities in the form of chat: each token with the `count` likeliest tokens at its position.

    The texts and their bytes, put together, make the choice's text, special tokens included.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], count: int) -> None:
        self._texts = TokenTexts(tokenizer, before)
        self._count = count

    def tokens(self, token_ids: Sequence[int], positions: Positions) -> ChatLogprobs:
        """The part of newly generated tokens."""
        return ChatLogprobs([self._token(token_id, position or {}) for token_id, position in zip(token_ids, positions, strict=True)])

    def _token(self, token_id: int, position: Mapping[int, Logprob]) -> ContentLogprob:
        text = self._texts.next(token_id)
        likeliest = sorted(position.items(), key=lambda item: -item[1].logprob)[: self._count]
        return ContentLogprob(
            text,
            max(position[token_id].logprob, _LOWEST) if token_id in position else _LOWEST,
            list(text.encode()),
            [self._alternative(text if other == token_id else entry.decoded_token or "", entry) for other, entry in likeliest],
        )

    @staticmethod
    def _alternative(text: str, entry: Logprob) -> TokenLogprob:
        return TokenLogprob(text, max(entry.logprob, _LOWEST), None if _REPLACEMENT in text else list(text.encode()))


class LogprobWriter:
    """Writes one choice's log-probabilities. `hidden` tokens do not show in the text; `before` are the tokens that come before it.

    A token's text is what it adds to the choice's text.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], before: Sequence[int]) -> None:
        self._hidden = hidden
        self._texts = TokenTexts(tokenizer, before)
        self._offset = 0

    def prompt(self, prompt: Prompt, positions: Positions) -> Logprobs:
        """The part that echoes the prompt; `positions[i]` belongs to token i, and the first is none."""
        part = self._write(prompt.token_ids, positions)
        self._offset = len(prompt.text)
        return Logprobs(list(prompt.offsets), part.token_logprobs, part.tokens, part.top_logprobs)

    def tokens(self, token_ids: Sequence[int], positions: Positions) -> Logprobs:
        """The part of newly generated tokens."""
        return self._write(token_ids, positions)

    def _write(self, token_ids: Sequence[int], positions: Positions) -> Logprobs:
        part = Logprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._texts.next(token_id)
            part.text_offset.append(self._offset)
            part.tokens.append(text)
            part.token_logprobs.append(None if position is None else max(position[token_id].logprob, _LOWEST))
            part.top_logprobs.append(None if position is None else _alternatives(token_id, text, position))
            if token_id not in self._hidden:
                self._offset += len(text)
        return part


def join(first: Logprobs, second: Logprobs) -> Logprobs:
    """Two consecutive parts as one."""
    return Logprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def _alternatives(token_id: int, text: str, position: Mapping[int, Logprob]) -> dict[str, float]:
    """The chosen token under its text, the others under theirs; one without a text of its own goes by vLLM's `token_id:N`."""
    alternatives = {text: max(position[token_id].logprob, _LOWEST)}
    for other, entry in position.items():
        if other != token_id:
            name = entry.decoded_token
            if not name or name in alternatives or _REPLACEMENT in name:
                name = f"token_id:{other}"
            alternatives[name] = max(entry.logprob, _LOWEST)
    return alternatives
