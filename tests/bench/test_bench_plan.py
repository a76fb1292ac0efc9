"""What the benchmark's options mean, and which of them are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minedraft_core.bench.plan import ALL_CORES, arms_of, check, gpu_arms_of, named_cores
from minedraft_core.bench.prompts import SHIPPED, deal, read_prompts
from minedraft_core.config import ConfigError
from minedraft_core.cores import Cores
from minedraft_core.types import Mode
from tests.bench.samples import CORES, plan


def test_off_has_an_arm_on_all_cores() -> None:
    arms = arms_of(["off", "sequential", "parallel"], CORES)
    assert [(arm.name, arm.mode, arm.cores) for arm in arms] == [
        ("off", Mode.OFF, CORES),
        (ALL_CORES, Mode.OFF, Cores((0, 1, 2), ())),
        ("sequential", Mode.SEQUENTIAL, CORES),
        ("parallel", Mode.PARALLEL, CORES),
    ]


def test_every_mode_but_off_has_an_arm_with_tetris() -> None:
    arms = arms_of(["pearl", "sequential-tetris", "parallel-tetris", "pearl-tetris"], CORES)
    assert [(arm.name, arm.mode, arm.tetris) for arm in arms] == [
        ("pearl", Mode.PEARL, False),
        ("sequential-tetris", Mode.SEQUENTIAL, True),
        ("parallel-tetris", Mode.PARALLEL, True),
        ("pearl-tetris", Mode.PEARL, True),
    ]


def test_tetris_on_gpus_has_the_drafter_on_a_device_of_its_own() -> None:
    arms = gpu_arms_of(["sequential-tetris", "parallel-tetris"])
    assert [(arm.mode, arm.tetris, arm.extra_devices) for arm in arms] == [(Mode.SEQUENTIAL, True, 1), (Mode.PARALLEL, True, 1)]


def test_draft_lengths_can_follow_the_batch_in_both_modes_without_lookahead() -> None:
    assert [(arm.mode, arm.by_batch, arm.plain) for arm in arms_of(["sequential-by-batch", "parallel-by-batch"], CORES)] == [
        (Mode.SEQUENTIAL, True, False),
        (Mode.PARALLEL, True, False),
    ]
    names = ["parallel-by-batch", "sequential-shared-by-batch"]
    assert [(arm.by_batch, arm.shared, arm.extra_devices) for arm in gpu_arms_of(names)] == [(True, False, 1), (True, True, 0)]


@pytest.mark.parametrize("mode", ["pearl-shared", "pearl-tetris", "pearl-by-batch", "native-by-batch"])
def test_what_gpus_do_not_know_is_refused_there(mode: str) -> None:
    with pytest.raises(ConfigError, match="--modes"):
        gpu_arms_of([mode])


@pytest.mark.parametrize("modes", [[], ["off", "off"], ["eagle"], ["off-tetris"], ["off-by-batch"], ["pearl-by-batch"]])
def test_unknown_and_repeated_modes_are_refused(modes: list[str]) -> None:
    with pytest.raises(ConfigError, match="--modes"):
        arms_of(modes, CORES)


@pytest.mark.parametrize(
    ("target", "drafter", "expected"),
    [
        ("", "", Cores((0, 1, 2), (3,))),
        ("0", "", Cores((0,), (1, 2, 3))),
        ("", "0-1", Cores((2, 3), (0, 1))),
        ("3", "0, 2", Cores((3,), (0, 2))),
    ],
)
def test_cores_that_are_not_named_are_chosen(target: str, drafter: str, expected: Cores) -> None:
    assert named_cores(target, drafter, range(4)) == expected


@pytest.mark.parametrize(
    ("target", "drafter", "available", "message"),
    [
        ("0", "0", (0, 1), "share"),
        ("7", "", (0, 1), "may not use"),
        ("0,0", "", (0, 1), "--target-cores: a core is named twice"),
        ("", "1-x", (0, 1), "--drafter-cores: '1-x'"),
        ("", "", (0,), "needs a core"),
        ("0-1", "", (0, 1), "needs a core"),
    ],
)
def test_cores_that_cannot_be_used_are_refused(target: str, drafter: str, available: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_cores(target, drafter, available)


def test_a_possible_plan_is_taken() -> None:
    assert check(plan()) == plan()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": None}, "--draft"),
        ({"num_tokens": 0}, "--num-speculative-tokens"),
        ({"num_tokens": 60, "tetris_extra": 5}, "--tetris-extra-proposals: both together"),
        ({"per_batch_size": ((1, 8, 2),)}, "give both or neither"),
        ({"arms": arms_of(["sequential-by-batch"], CORES)}, "give both or neither"),
        ({"concurrency": ()}, "--concurrency"),
        ({"concurrency": (0,)}, "--concurrency"),
        ({"concurrency": (8, 8)}, "--concurrency"),
        ({"acceptance": 0.8, "arms": arms_of(["sequential"], CORES)}, "put off first"),
        ({"acceptance": 0.8, "arms": arms_of(["off"], CORES)}, "--acceptance: off alone does not draft"),
        ({"drafter_fused": "layers", "arms": gpu_arms_of(["off"])}, "--drafter-fused: off alone does not draft"),
        ({"tetris_capacity": 8}, "none of --modes has TETRIS"),
        ({"tetris_extra": 1}, "none of --modes has TETRIS"),
    ],
)
def test_impossible_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(plan(**changes))


def test_plain_decoding_needs_no_drafter() -> None:
    check(plan(draft=None, arms=arms_of(["off"], CORES)))


def test_shipped_prompts_cover_many_categories() -> None:
    prompts = read_prompts(SHIPPED)
    assert len(prompts) == len(set(prompts)) == 64


def test_both_forms_of_prompts_are_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"question_id": 7, "turns": ["two", "three"]}\n')
    assert read_prompts(file) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"), [("", "holds no prompt"), ("{}\n", "line 1"), ('{"prompt": "a"}\n{', "line 2"), ('{"prompt": 3}', "line 1")]
)
def test_prompts_of_another_form_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prompts: .*none\.jsonl cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


def test_runs_go_through_the_prompts_in_turn() -> None:
    assert [deal("abcde", 2, run) for run in range(3)] == [["a", "b"], ["c", "d"], ["e", "a"]]
