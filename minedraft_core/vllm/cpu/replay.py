"""For benchmarks: a drafter that works as ever, while its tokens come from a recording and are right with a given probability."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from minedraft_core.vllm.cpu.contexts import DraftContext, DraftContexts
from minedraft_core.vllm.cpu.draft_loop import DraftLoop, LanguageModel

_SEED = 0
_REACH = 8


class Replay:
    """What the target wrote, found by the length and the last tokens of a context."""

    def __init__(self, recordings: Iterable[tuple[list[int], list[int]]], acceptance: float) -> None:
        """`recordings` are prompts and outputs; `acceptance` is the probability that a token is right, given that all before it are."""
        self._acceptance = acceptance
        self._random = random.Random(_SEED)  # noqa: S311 - draws of a benchmark
        self._outputs: list[list[int]] = []
        self._places: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        for prompt, output in recordings:
            tokens = prompt + output
            for written in range(1, len(output)):
                length = len(prompt) + written
                self._places.setdefault((length, tuple(tokens[max(0, length - _REACH) : length])), (len(self._outputs), written))
            self._outputs.append(output)

    def replace(self, context: Sequence[int], own: list[int]) -> list[int]:
        """The drafter's own tokens, replaced by the target's up to the first wrong one. A context that was not recorded keeps its own."""
        place = self._places.get((len(context), tuple(context[-_REACH:])))
        if place is None:
            return own
        output, written = place
        tokens = list(own)
        for index, right in enumerate(self._outputs[output][written : written + len(own)]):
            if self._random.random() < self._acceptance:
                tokens[index] = right
                continue
            if tokens[index] == right:
                tokens[index] = right - 1 if right else 1
            break
        return tokens


class ReplayLoop(DraftLoop):
    """Drafts as its base does, then puts the replayed tokens in place.

    The KV cache keeps the entries of the drafter's own tokens: an order costs what it costs a drafter that is accepted as often.
    """

    def __init__(self, model: LanguageModel, contexts: DraftContexts, recordings: Path, acceptance: float) -> None:
        """`recordings` is a JSON list of pairs: the ids of a prompt, the ids that the target wrote after it."""
        super().__init__(model, contexts)
        self._replay = Replay(msgspec.json.decode(recordings.read_bytes(), type=list[tuple[list[int], list[int]]]), acceptance)

    def _draft(self, contexts: Sequence[DraftContext], num_tokens: int, limits: Sequence[int]) -> list[list[int]]:
        drafts = super()._draft(contexts, num_tokens, limits)
        return [self._replay.replace(context.tokens, own) for context, own in zip(contexts, drafts, strict=True)]
