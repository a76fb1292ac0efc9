"""Which engines are started and which runs they make, with an engine that decodes by rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minedraft_core.bench.plan import ALL_CORES, Arm, arms_of
from minedraft_core.bench.runner import Start, run_benchmark
from minedraft_core.bench.statistics import Figures
from minedraft_core.config import ConfigError, PipelineConfig
from minedraft_core.types import Mode, Record, Span
from tests.bench.samples import CORES, plan, step

TEXTS = ["a", "bb", "ccc"]


class RuleEngine:
    """Writes a prompt's length again and again, one token in each pass of 10 ms."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log
        self._pending: list[Record] = []

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        return [[len(prompt)] * len(prompt) for prompt in prompts]

    def random_prompts(self, count: int, length: int) -> list[list[int]]:
        return [[length] * length for _ in range(count)]

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[list[int]], Span]:
        self._log.append(("run", [len(prompt) for prompt in prompts]))
        self._pending = [step(0, 0, 50, running=len(prompts), prompt=True)]
        self._pending += [
            step(number, 50 + 10 * number, 60 + 10 * number, running=len(prompts), generated=len(prompts), mode=Mode.OFF)
            for number in range(max_tokens - 1)
        ]
        return [[len(prompt)] * max_tokens for prompt in prompts], Span(0, 1_000_000)

    def take_records(self, num_tokens: int) -> list[Record]:
        return self._pending


def starter(log: list[Any]) -> Start:
    @contextmanager
    def start(arm: Arm, config: PipelineConfig) -> Iterator[RuleEngine]:
        replayed = None
        if config.drafter.replay is not None:
            replayed = msgspec.json.decode(Path(config.drafter.replay).read_bytes())
        log.append(("start", config, config.target_cores, replayed))
        yield RuleEngine(log)
        log.append(("end",))

    return start


def measure(tmp_path: Path, **changes: Any) -> tuple[list[Any], dict[tuple[Arm, int], Figures]]:
    log: list[Any] = []
    made = plan(**{"arms": arms_of(["off", "sequential", "parallel"], CORES), "concurrency": (1, 2), "max_tokens": 6, **changes})
    return log, run_benchmark(made, TEXTS, starter(log), tmp_path / "recordings", lambda line: None)


def test_every_arm_has_one_engine_and_all_its_runs(tmp_path: Path) -> None:
    log, figures = measure(tmp_path, repeats=2, warmup=1)
    starts = [entry for entry in log if entry[0] == "start"]
    assert [entry[1].speculative.mode for entry in starts] == [Mode.OFF, Mode.OFF, Mode.SEQUENTIAL, Mode.PARALLEL]
    assert [entry[2] for entry in starts] == [(0, 1), (0, 1, 2), (0, 1), (0, 1)]
    assert starts[2][1].drafter.cores == (2,)
    assert log[:8] == [starts[0], *(("run", lengths) for lengths in ([1], [2], [3], [1, 2], [3, 1], [2, 3])), ("end",)]
    assert {(arm.name, count) for arm, count in figures} == {
        (name, count) for name in ("off", ALL_CORES, "sequential", "parallel") for count in (1, 2)
    }


def test_warm_up_runs_leave_no_figures_and_rounds_add_up(tmp_path: Path) -> None:
    log, figures = measure(tmp_path, repeats=2, warmup=3, rounds=2)
    assert sum(entry[0] == "start" for entry in log) == 8
    assert {len(found.tokens_per_second_runs) for found in figures.values()} == {4}
    assert {(count, round(found.tokens_per_second)) for (_, count), found in figures.items()} == {(1, 100), (2, 200)}
    assert {(count, round(found.tokens_per_second_whole)) for (_, count), found in figures.items()} == {(1, 6), (2, 12)}


def test_a_replay_gets_what_plain_decoding_wrote(tmp_path: Path) -> None:
    log, _ = measure(tmp_path, repeats=1, warmup=1, acceptance=0.7)
    starts = [entry for entry in log if entry[0] == "start"]
    assert [entry[3] is None for entry in starts] == [True, True, False, False]
    assert starts[2][1].drafter.replay_acceptance == 0.7
    one_arm = [[[1], [1] * 6], [[2, 2], [2] * 6], [[1], [1] * 6], [[2, 2], [2] * 6], [[3, 3, 3], [3] * 6], [[1], [1] * 6]]
    assert starts[3][3] == one_arm * 2


def test_runs_without_a_steady_state_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raise --max-tokens"):
        measure(tmp_path, max_tokens=2)


def test_an_engine_that_does_not_start_leaves_what_the_ones_before_it_gave(tmp_path: Path) -> None:
    kept: list[dict[tuple[Arm, int], Figures]] = []

    @contextmanager
    def start(arm: Arm, config: PipelineConfig) -> Iterator[RuleEngine]:
        if arm.mode is Mode.PARALLEL:
            raise ConfigError("no room for it")
        with starter([])(arm, config) as engine:
            assert isinstance(engine, RuleEngine)
            yield engine

    made = plan(arms=arms_of(["off", "sequential", "parallel"], CORES), concurrency=(1,), max_tokens=6)
    with pytest.raises(ConfigError, match="no room for it"):
        run_benchmark(made, TEXTS, start, tmp_path / "recordings", lambda line: None, kept.append)
    assert [[arm.name for arm, _ in found] for found in kept] == [["off"], ["off", ALL_CORES], ["off", ALL_CORES, "sequential"]]
