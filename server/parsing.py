"""Streams through vLLM's parsers: most of them were written for one token at a time, and speculation delivers several."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.outputs import CompletionOutput
from vllm.parser.abstract_parser import Parser

from server.detokenizing import TokenTexts


class DeltaParser:
    """Parses one choice, output by output. With `texts` each token is parsed on its own, with what it adds to the text."""

    def __init__(self, parser: Parser, request: ChatCompletionRequest, prompt: list[int], texts: TokenTexts | None) -> None:
        self._parser, self._request, self._prompt, self._texts = parser, request, prompt, texts
        self._waiting: deque[tuple[int, str]] = deque()
        # Delivered and not parsed yet: the engine may hold text back, or cut it off at a stop string.
        self._unseen = ""

    def feed(self, completion: CompletionOutput) -> DeltaMessage | None:
        """What the output adds to the message, or none where the parser keeps it to itself."""
        finished = completion.finish_reason is not None
        if self._texts is None:
            return self._parse(completion.text, completion.token_ids, finished)
        self._waiting.extend((token_id, self._texts.next(token_id)) for token_id in completion.token_ids)
        self._unseen += completion.text
        deltas = []
        while self._waiting and (finished or len(self._waiting[0][1]) <= len(self._unseen)):
            token_id, text = self._waiting.popleft()
            ends = finished and not self._waiting
            seen, self._unseen = (self._unseen, "") if ends else (self._unseen[: len(text)], self._unseen[len(text) :])
            deltas.append(self._parse(seen, [token_id], ends))
        if finished and not completion.token_ids and not deltas:
            deltas.append(self._parse(self._unseen, [], finished))
        return merged([delta for delta in deltas if delta is not None])

    def _parse(self, text: str, token_ids: Sequence[int], finished: bool) -> DeltaMessage | None:
        return self._parser.parse_delta(
            delta_text=text, delta_token_ids=list(token_ids), request=self._request, prompt_token_ids=self._prompt, finished=finished
        )


def takes_blocks(parser: Parser) -> bool:
    """Whether the parser is one of those that take any number of tokens at once."""
    parts = (parser.reasoning_parser, parser.tool_parser)
    return all(part is None or part.engine_based_streaming for part in parts)


def merged(deltas: Sequence[DeltaMessage]) -> DeltaMessage | None:
    """Consecutive deltas as one; parts of the same tool call are joined."""
    if len(deltas) < 2:
        return deltas[0] if deltas else None
    calls: dict[int, DeltaToolCall] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        known = calls.get(call.index)
        calls[call.index] = call if known is None else _joined_calls(known, call)
    return DeltaMessage(
        content=_joined([delta.content for delta in deltas]),
        reasoning=_joined([delta.reasoning for delta in deltas]),
        tool_calls=list(calls.values()),
    )


def _joined_calls(first: DeltaToolCall, second: DeltaToolCall) -> DeltaToolCall:
    functions = [call.function for call in (first, second) if call.function is not None]
    function = DeltaFunctionCall(
        name=_joined([function.name for function in functions]), arguments=_joined([function.arguments for function in functions])
    )
    return DeltaToolCall(
        index=first.index, id=first.id or second.id, type=first.type or second.type, function=function if functions else None
    )


def _joined(parts: Sequence[str | None]) -> str | None:
    present = [part for part in parts if part is not None]
    return "".join(present) if present else None
