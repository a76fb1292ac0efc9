"""The fixed tokens of a chat: what comes before, between and after the words of user and assistant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minedraft_core.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST, _REPLY, _SECOND = "Q7f1", "A7f2", "Q7f3"


@dataclass(frozen=True)
class Template:
    """Token ids that the target does not choose itself.

    `opening` precedes the user's first words, `to_answer` leads from the user's words to the answer, `to_user` from the answer to the
    user's next words; a token of `stops` ends a turn.
    """

    opening: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Template:
        """Read the pieces off the tokenizer's chat template.

        A tokenizer without one gives a template for plain text: every text starts with the begin (or end) token and has no turns.
        Raises ConfigError where the template drops or reorders messages, or where there is no token to start with.
        """
        if not tokenizer.chat_template:
            start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
            if start is None:
                raise ConfigError("the target's tokenizer has neither a chat template nor a begin or end token; add one of them")
            return cls((start,), (start,), (start,), () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
        messages = [
            {"role": "user", "content": _FIRST},
            {"role": "assistant", "content": _REPLY},
            {"role": "user", "content": _SECOND},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pieces = []
        for mark in (_FIRST, _REPLY, _SECOND):
            before, found, text = text.partition(mark)
            if not found:
                raise ConfigError("the target's chat template does not keep the words of user, assistant, user in this order")
            pieces.append(tuple(tokenizer(before, add_special_tokens=False).input_ids))
        opening, _, to_user = pieces
        to_answer = tuple(tokenizer(text, add_special_tokens=False).input_ids)
        if not (opening and to_answer and to_user):
            raise ConfigError("the target's chat template puts nothing between the turns, so an answer has no end")
        stops = {to_answer[0], to_user[0]} | ({tokenizer.eos_token_id} - {None})
        return cls(opening, to_answer, to_user, tuple(sorted(stops)))

    def question(self, tokenizer: PreTrainedTokenizerBase, words: str) -> list[int]:
        """Token ids of a prompt with the user's `words`, up to where the answer starts."""
        return [*self.opening, *tokenizer(words, add_special_tokens=False).input_ids, *self.to_answer]
