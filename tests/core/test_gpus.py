"""Waiting for free GPUs, with a reader of usage in NVML's place."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

from minedraft_core.config import ConfigError
from minedraft_core.gpus import FreeGpus, GpuUse, among_visible, describe_gpus, free_among, read_use, take_gpus, wait_for_gpus


def use(index: int, memory: float = 0.4, busy: float = 0.0) -> GpuUse:
    return GpuUse(index, f"GPU-{index}{index}-x", memory, busy)


class Machine:
    """Shows one set of usages at each look; counts the seconds that are slept."""

    def __init__(self, *looks: Sequence[GpuUse]) -> None:
        self._looks = list(looks)
        self.slept: list[float] = []
        self.told: list[str] = []

    def read(self) -> Sequence[GpuUse]:
        return self._looks.pop(0)

    def wait(self, wanted: FreeGpus) -> list[int]:
        return wait_for_gpus(wanted, self.read, self.told.append, self.slept.append)


def test_gpus_that_are_free_are_taken_at_once() -> None:
    machine = Machine([use(0, memory=50), use(1), use(2), use(3)])
    assert machine.wait(FreeGpus(2)) == [1, 2]
    assert machine.slept == []


def test_busy_ones_are_waited_for_and_named() -> None:
    busy = [use(0), use(1, memory=30, busy=99)]
    machine = Machine(busy, busy, [use(0), use(1)])
    assert machine.wait(FreeGpus(2, interval=7)) == [0, 1]
    assert machine.slept == [7, 7]
    assert machine.told == ["1 of 2 GPUs are free, in use: 1 (30 % memory, 99 % busy); looking again in 7 s"] * 2


def test_enough_must_be_free_at_the_same_time() -> None:
    machine = Machine([use(0), use(1, busy=5)], [use(0, busy=5), use(1)], [use(0), use(1)])
    assert machine.wait(FreeGpus(2)) == [0, 1]
    assert len(machine.slept) == 2


@pytest.mark.parametrize(("memory", "busy", "free"), [(0.99, 0.99, True), (1.0, 0.0, False), (0.0, 1.0, False)])
def test_both_thresholds_count(memory: float, busy: float, free: bool) -> None:
    assert bool(free_among([use(0, memory, busy)], FreeGpus(1))) is free
    assert free_among([use(0, memory, busy)], FreeGpus(1, memory_percent=2, utilisation_percent=2))


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 GPUs are asked for, this process may use 2; lower the number"):
        Machine([use(0), use(1)]).wait(FreeGpus(3))


def test_only_visible_ones_count_by_index_or_uuid() -> None:
    uses = [use(0), use(1), use(2)]
    assert [one.index for one in among_visible(uses, "2,GPU-00")] == [2, 0]
    assert among_visible(uses, None) == uses
    assert among_visible(uses, "") == []
    with pytest.raises(ConfigError, match="GPU 2 is named twice"):
        among_visible(uses, "2,GPU-22")
    with pytest.raises(ConfigError, match="no GPU is called '7'"):
        among_visible(uses, "7")


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is not None, reason="this installation is for GPUs")
def test_without_nvidias_library_it_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="--wait-for-gpus: this"):
        take_gpus(FreeGpus(1), {}, lambda line: None)
    with pytest.raises(ConfigError, match="--wait-for-gpus: this"):
        read_use()
    assert describe_gpus() == {}


@pytest.mark.parametrize("limit", ["memory_percent", "utilisation_percent", "interval"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_limit_is_a_finite_number(limit: str, value: float) -> None:
    with pytest.raises(ConfigError, match="need finite numbers"):
        FreeGpus(1, **{limit: value})


def test_flags_without_limits_take_the_defaults() -> None:
    assert FreeGpus.of_flags(2, None, None, None) == FreeGpus(2)
    assert FreeGpus.of_flags(2, 3.0, None, 4.0) == FreeGpus(2, memory_percent=3.0, interval=4.0)
    assert FreeGpus.of_flags(None, None, None, None) is None


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            (1.0, None, None),
            "--wait-for-gpus-memory needs --wait-for-gpus: name how many GPUs to wait for, or remove --wait-for-gpus-memory",
        ),
        ((None, None, 60.0), "--wait-for-gpus-interval needs --wait-for-gpus"),
        ((1.0, 1.0, None), "or remove --wait-for-gpus-memory and --wait-for-gpus-utilization"),
    ],
)
def test_limits_without_a_number_of_gpus_are_refused(limits: tuple[float | None, float | None, float | None], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FreeGpus.of_flags(None, *limits)
