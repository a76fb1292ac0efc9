"""The GPUs of this machine, as NVIDIA's management library (NVML) sees them: which are free, and what they are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from minedraft_core.config import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
_DAY_SECONDS = 86400


@dataclass(frozen=True)
class GpuUse:
    """How busy one GPU is. `index` is NVML's; memory and utilisation are percent."""

    index: int
    uuid: str
    memory_percent: float
    utilisation_percent: float


@dataclass(frozen=True)
class FreeGpus:
    """What to wait for: `count` GPUs that each use less memory and are busy less than these percent, looked at every `interval` seconds."""

    count: int
    memory_percent: float = 1.0
    utilisation_percent: float = 1.0
    interval: float = 60.0

    def __post_init__(self) -> None:
        """Raise ConfigError for limits that are no numbers, since nothing would ever be free, and for an interval of more than a day."""
        if not all(map(math.isfinite, (self.memory_percent, self.utilisation_percent, self.interval))):
            raise ConfigError("--wait-for-gpus-memory, --wait-for-gpus-utilization and --wait-for-gpus-interval need finite numbers")
        if self.interval > _DAY_SECONDS:
            raise ConfigError(f"--wait-for-gpus-interval: {self.interval:g} s are more than a day; give at most {_DAY_SECONDS}")

    @classmethod
    def of_flags(cls, count: int | None, memory: float | None, utilization: float | None, interval: float | None) -> Self | None:
        """What the flags `--wait-for-gpus*` ask for; None where the start waits for no GPU.

        Raises ConfigError for limits that then say nothing.
        """
        limits = {"memory": memory, "utilization": utilization, "interval": interval}
        given = [f"--wait-for-gpus-{name}" for name, value in limits.items() if value is not None]
        if count is not None:
            return cls(
                count,
                memory_percent=cls.memory_percent if memory is None else memory,
                utilisation_percent=cls.utilisation_percent if utilization is None else utilization,
                interval=cls.interval if interval is None else interval,
            )
        if given:
            raise ConfigError(f"{given[0]} needs --wait-for-gpus: name how many GPUs to wait for, or remove {' and '.join(given)}")
        return None


ReadUse = Callable[[], Sequence[GpuUse]]
"""Reads how busy each GPU is. Raises ConfigError where there is none."""


def free_among(uses: Sequence[GpuUse], wanted: FreeGpus) -> list[GpuUse]:
    """The GPUs that count as free, in the order given."""
    return [use for use in uses if use.memory_percent < wanted.memory_percent and use.utilisation_percent < wanted.utilisation_percent]


def wait_for_gpus(wanted: FreeGpus, read: ReadUse, tell: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> list[int]:
    """Wait until enough GPUs are free at the same time; the indices of the first `count` of them.

    `tell` gets a line each time some are missing. Raises ConfigError where there are not that many GPUs at all.
    """
    while True:
        uses = read()
        if len(uses) < wanted.count:
            raise ConfigError(f"--wait-for-gpus: {wanted.count} GPUs are asked for, this process may use {len(uses)}; lower the number")
        free = free_among(uses, wanted)
        if len(free) >= wanted.count:
            return [use.index for use in free[: wanted.count]]
        busy = ", ".join(
            f"{use.index} ({use.memory_percent:.0f} % memory, {use.utilisation_percent:.0f} % busy)" for use in uses if use not in free
        )
        tell(f"{len(free)} of {wanted.count} GPUs are free, in use: {busy}; looking again in {wanted.interval:g} s")
        sleep(wanted.interval)


def take_gpus(wanted: FreeGpus, environment: MutableMapping[str, str], tell: Callable[[str], None]) -> None:
    """Wait for free GPUs among those that the environment makes visible, and make only these visible. Call before CUDA is used.

    Raises ConfigError where there are no GPUs, or not so many.
    """
    visible = environment.get(_VISIBLE)
    chosen = wait_for_gpus(wanted, lambda: among_visible(read_use(), visible), tell)
    # NVML counts by the bus, CUDA by speed unless told otherwise.
    environment[_ORDER] = "PCI_BUS_ID"
    environment[_VISIBLE] = ",".join(map(str, chosen))
    tell(f"GPUs {environment[_VISIBLE]} are free and taken")


def among_visible(uses: Sequence[GpuUse], visible: str | None) -> list[GpuUse]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` names by index or UUID, in its order; all where it is not set.

    Raises ConfigError for a name that no GPU has, and for a GPU that is named twice.
    """
    if visible is None:
        return list(uses)
    found = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        match = next((use for use in uses if str(use.index) == name or use.uuid.startswith(name)), None)
        if match is None:
            raise ConfigError(f"{_VISIBLE}: no GPU is called {name!r}; there are {', '.join(str(use.index) for use in uses)}")
        if match in found:
            raise ConfigError(f"{_VISIBLE}: GPU {match.index} is named twice; name each once")
        found.append(match)
    return found


def read_use() -> list[GpuUse]:
    """How busy each GPU of the machine is. Raises ConfigError where NVML finds none."""
    with _nvml() as nvml:
        uses = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            # Version 2 keeps the driver's own memory apart from what is in use.
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            uses.append(GpuUse(index, nvml.nvmlDeviceGetUUID(handle), 100 * memory.used / memory.total, float(busy)))
        return uses


def describe_gpus() -> dict[str, Any]:
    """Driver, and name, memory, clocks (MHz now and at most) and power limit of each GPU; empty where NVML finds none."""
    try:
        with _nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return {"driver": nvml.nvmlSystemGetDriverVersion(), "devices": [_describe(nvml, handle) for handle in handles]}
    except ConfigError:
        return {}


def _describe(nvml: Any, handle: Any) -> dict[str, Any]:
    def known(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except nvml.NVMLError:
            return None

    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "sm_mhz": known(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "sm_max_mhz": known(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_mhz": known(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "power_limit_watts": known(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
    }


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ModuleNotFoundError:
        raise ConfigError(
            "--wait-for-gpus: this installation is for CPUs (no nvidia-ml-py), so there is no GPU to wait for; remove it"
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ConfigError(f"--wait-for-gpus: this machine shows no NVIDIA GPU ({error}); remove it") from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
