"""For benchmarks: a drafter that works as ever, while its tokens come from a recording and are right with a given probability."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from minedraft_core.vllm.cpu.contexts import DraftContext, DraftContexts
from minedraft_core.vllm.cpu.draft_loop import DraftLoop, LanguageModel

_SEED = 0
REACH = 8
"""Tokens at the end of a context by which it is found."""


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
                self._places.setdefault((length, tuple(tokens[max(0, length - REACH) : length])), (len(self._outputs), written))
            self._outputs.append(output)

    def token(self, length: int, last: Sequence[int], own: int) -> int:
        """The token after a context of `length` tokens that ends in `last`: the target's, or a wrong one.

        After a context that was not recorded, such as one with a wrong token, it is the drafter's `own`.
        """
        place = self._places.get((length, tuple(last)))
        if place is None:
            return own
        output, written = place
        right = self._outputs[output][written]
        if self._random.random() < self._acceptance:
            return right
        if own != right:
            return own
        return right - 1 if right else 1


class ReplayLoop(DraftLoop):
    """Drafts as its base does, with the replayed tokens on the chains. An order costs what it costs a drafter that is accepted as often."""

    def __init__(self, model: LanguageModel, contexts: DraftContexts, recordings: Path, acceptance: float) -> None:
        """`recordings` is a JSON list of pairs: the ids of a prompt, the ids that the target wrote after it."""
        super().__init__(model, contexts)
        self._replay = Replay(msgspec.json.decode(recordings.read_bytes(), type=list[tuple[list[int], list[int]]]), acceptance)

    def _written(self, context: DraftContext, token: int) -> int:
        last = (context.tokens[-REACH:] + context.chain)[-REACH:]
        return self._replay.token(len(context.tokens) + len(context.chain), last, token)
