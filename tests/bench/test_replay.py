"""Replayed drafts are right with the given probability, and only where the target's own tokens are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from minedraft_core.types import DraftBatch, DraftItem
from minedraft_core.vllm.cpu.contexts import DraftContexts
from minedraft_core.vllm.cpu.noise import Draw
from minedraft_core.vllm.cpu.query import Chosen, Query
from minedraft_core.vllm.cpu.replay import REACH, Replay, ReplayLoop

PROMPT = list(range(100, 120))
OUTPUT = list(range(200, 264))
OWN = [7, 7, 7, 7]


def replaced(replay: Replay, context: list[int], own: list[int]) -> list[int]:
    """A draft token by token, each after what was put in place before it."""
    tokens: list[int] = []
    for token in own:
        whole = [*context, *tokens]
        tokens.append(replay.token(len(whole), whole[-REACH:], token))
    return tokens


def test_with_probability_one_the_draft_is_what_the_target_wrote() -> None:
    replay = Replay([(PROMPT, OUTPUT)], 1.0)
    assert replaced(replay, PROMPT + OUTPUT[:10], OWN) == OUTPUT[10:14]
    assert replaced(replay, PROMPT + OUTPUT[:1], OWN[:2]) == OUTPUT[1:3]


def test_at_the_end_of_the_recording_the_own_tokens_stay() -> None:
    assert replaced(Replay([(PROMPT, OUTPUT)], 1.0), PROMPT + OUTPUT[:62], OWN) == [*OUTPUT[62:], 7, 7]


@pytest.mark.parametrize("context", [PROMPT, [1, *PROMPT, *OUTPUT[:10]], [*PROMPT, *OUTPUT[:9], 1]])
def test_a_context_that_was_not_recorded_keeps_the_own_tokens(context: list[int]) -> None:
    assert replaced(Replay([(PROMPT, OUTPUT)], 1.0), context, OWN) == OWN


def test_with_probability_zero_the_first_token_is_wrong_even_where_the_drafter_was_right() -> None:
    replay = Replay([(PROMPT, OUTPUT)], 0.0)
    context, right = PROMPT + OUTPUT[:10], OUTPUT[10:14]
    assert replaced(replay, context, OWN) == OWN
    assert replaced(replay, context, right)[0] != right[0]
    assert replaced(Replay([(PROMPT, [0] * 8)], 0.0), [*PROMPT, 0], [0])[0] > 0


def test_each_position_is_right_with_the_probability_given_those_before_it() -> None:
    replay = Replay([(PROMPT, OUTPUT)], 0.7)
    context, right = PROMPT + OUTPUT[:10], OUTPUT[10:14]
    counts = [0] * 5
    for _ in range(20_000):
        tokens = replaced(replay, context, OWN)
        matching = [token == wanted for token, wanted in zip(tokens, right, strict=True)]
        counts[matching.index(False) if False in matching else 4] += 1
        assert not any(matching[matching.index(False) :] if False in matching else [])
    expected = [0.3, 0.21, 0.147, 0.1029, 0.2401]
    assert [count / 20_000 for count in counts] == pytest.approx(expected, abs=0.012)


def test_recordings_of_one_prompt_that_part_are_told_apart() -> None:
    other = [*OUTPUT[:10], *range(400, 454)]
    replay = Replay([(PROMPT, OUTPUT), (PROMPT, other)], 1.0)
    assert replaced(replay, [*PROMPT, *OUTPUT[:11]], OWN) == OUTPUT[11:15]
    assert replaced(replay, [*PROMPT, *other[:11]], OWN) == other[11:15]


class CountingModel:
    """Its next token is always 7; keeps the queries it ran."""

    def __init__(self) -> None:
        self.passes: list[list[tuple[list[int], int]]] = []

    def run(self, queries: Sequence[Query]) -> None:
        self.passes.append([(list(query.tokens), query.start) for query in queries])

    def choose(self, queries: Sequence[Query], draws: Sequence[Draw | None]) -> Chosen:
        self.run(queries)
        return Chosen([7 for _ in draws])


def test_the_drafter_does_the_work_of_one_whose_tokens_were_accepted(tmp_path: Path) -> None:
    recordings = tmp_path / "recordings"
    recordings.write_bytes(msgspec.json.encode([(PROMPT, OUTPUT)]))
    model = CountingModel()
    loop = ReplayLoop(model, DraftContexts(8, 32, 128), recordings, 1.0)
    first = loop.answer(DraftBatch(1, 4, [DraftItem("a", 0, PROMPT + OUTPUT[:1], 4)]))
    assert first.tokens == [OUTPUT[1:5]]
    model.passes.clear()
    second = loop.answer(DraftBatch(2, 4, [DraftItem("a", len(PROMPT) + 1, OUTPUT[1:6], 4)]))
    assert second.tokens == [OUTPUT[6:10]]
    assert [[len(tokens) for tokens, _ in queries] for queries in model.passes] == [[2], [1], [1], [1]]
