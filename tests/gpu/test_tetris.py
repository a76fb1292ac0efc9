"""TETRIS on the device: what is kept, what the host and the kernels are told of it, and what the records say. On CPU."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minedraft_core.config import ConfigError, MineDraftConfig
from minedraft_core.control import ModeOrder
from minedraft_core.tetris import Room, choose
from minedraft_core.types import Mode, StepRecord
from minedraft_core.vllm.gpu.tetris import DeviceTetris, room_of
from tests.gpu.simulation import Loop, request, scheduler

SLOTS, K = 8, 5
BATCHES = st.lists(st.tuples(st.integers(0, K), st.integers(1, 4)), min_size=1, max_size=SLOTS)


def device(room: Room, most_logits: int = 1000) -> tuple[DeviceTetris, torch.Tensor, torch.Tensor]:
    scores = -torch.rand(SLOTS, K, generator=torch.Generator().manual_seed(1))
    starts = torch.full((SLOTS + 1,), -1, dtype=torch.int32)
    return DeviceTetris(scores, starts, room, most_logits), scores, starts


@given(BATCHES, st.integers(1, 30), st.integers(1, 4), st.randoms())
def test_host_and_device_agree_on_a_trimmed_batch(batch: list[tuple[int, int]], tokens: int, turn_on: int, random: object) -> None:
    tetris, scores, starts = device(Room(tokens, turn_on))
    names = [f"r{number}" for number in range(len(batch))]
    drafts = np.array([count for count, _ in batch], dtype=np.int32)
    scheduled = np.array([count + own for count, own in batch], dtype=np.int32)
    slots = torch.tensor(random.sample(range(SLOTS), len(batch)))
    placeholders = {name: [-1] * count for name, (count, _) in zip(names, batch, strict=True) if count}
    total = tetris.get_num_tokens({name: int(count) for name, count in zip(names, scheduled, strict=True)}, placeholders)
    bounds = np.concatenate([[0], np.cumsum(drafts + 1)]).astype(np.int32)
    lengths, same = tetris.compact_batch(drafts, scheduled, bounds)
    logits, returned, kept = tetris.reallocate_drafts(names, slots)

    works = int((drafts > 0).sum()) >= turn_on
    assert kept == (min(tokens, drafts.sum()) if works else drafts.sum())
    assert total == int((scheduled - drafts).sum()) + kept
    assert (lengths.sum(), lengths.dtype) == (total, np.int32)
    assert (lengths >= scheduled - drafts).all()
    assert same is bounds
    chosen = choose(scores[slots], torch.tensor(drafts, dtype=torch.int64), kept)
    assert returned is starts
    assert (logits.dtype, starts.dtype) == (torch.int32, torch.int32)
    assert logits.tolist() == [0, *accumulate((chosen + 1).tolist())]
    counts = [own + count for (_, own), count in zip(batch, chosen.tolist(), strict=True)]
    assert starts.tolist() == [0, *accumulate(counts)] + [total] * (SLOTS - len(batch))


def test_a_pass_too_large_to_sample_from_is_refused_with_what_to_change() -> None:
    device(Room(20, 1), SLOTS + 20)
    with pytest.raises(ConfigError, match="'tetris_capacity'"):
        device(Room(21, 1), SLOTS + 20)
    with pytest.raises(ConfigError, match="up to 35 draft tokens"):
        device(Room(20, 8), SLOTS + 34)


@pytest.mark.parametrize(
    ("keys", "room"),
    [
        ({}, None),
        ({"tetris": True}, Room(4 * 7, 1)),
        ({"tetris": True, "is_parallel": True}, Room(4 * 4, 1)),
        ({"tetris": True, "tetris_capacity": 9, "tetris_turn_on_batch_size": 3}, Room(9, 3)),
    ],
)
def test_the_room_follows_from_the_configuration(keys: dict[str, object], room: Room | None) -> None:
    assert room_of(MineDraftConfig.parse({"model": "d", "num_speculative_tokens": 4, **keys}), 7) == room


TETRIS = {"tetris": True, "tetris_capacity": 7, "tetris_extra_proposals": 2}


def started(tmp_path: Path, mode: str, **keys: object) -> Loop:
    loop = Loop(scheduler(tmp_path, mode, k=3, keys={**TETRIS, **keys}), accept=lambda _name, _drafted: 1)
    for index in range(4):
        loop.scheduler.add_request(request(f"r{index}", tokens=20 + index))
    return loop


def steps(loop: Loop) -> list[StepRecord]:
    return [record for record in loop.scheduler._feed.records if isinstance(record, StepRecord)]


@pytest.mark.parametrize(("mode", "batch"), [("sequential", 4), ("parallel", 2)])
def test_a_pass_is_scheduled_for_all_drafts_and_recorded_as_trimmed(tmp_path: Path, mode: str, batch: int) -> None:
    loop = started(tmp_path, mode)
    loop.run(60)
    assert loop.tokens == {f"r{index}": 20 + index for index in range(4)}
    assert [len(drafts) for drafts in loop.passes[2].scheduled_spec_decode_tokens.values()] == [5] * batch
    step = steps(loop)[3]
    assert (step.proposed_len, step.verify_len, step.accepted_num) == (5 * batch, 7, batch)
    assert step.dropped == {"tetris": 5 * batch - 7}
    assert step.num_speculative_tokens == 3


def test_a_small_batch_is_drafted_for_and_verified_as_without_tetris(tmp_path: Path) -> None:
    loop = started(tmp_path, "sequential", tetris_turn_on_batch_size=5)
    loop.run(60)
    assert loop.tokens == {f"r{index}": 20 + index for index in range(4)}
    lengths = {len(drafts) for made in loop.passes for drafts in made.scheduled_spec_decode_tokens.values()}
    assert max(lengths) == 3
    assert (steps(loop)[3].verify_len, steps(loop)[3].dropped) == (12, {})


def test_k_can_be_lowered_under_load_and_not_raised_into_the_extra_proposals(tmp_path: Path) -> None:
    loop = started(tmp_path, "sequential")
    loop.run(4)
    loop.scheduler._obey(ModeOrder(Mode.SEQUENTIAL, 1))
    loop.run(4)
    assert {len(drafts) for drafts in loop.passes[-1].scheduled_spec_decode_tokens.values()} == {3}
    assert loop.scheduler.num_drafts == 1
