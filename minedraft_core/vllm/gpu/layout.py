"""Which device runs what, and how many KV blocks fit on both. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from minedraft_core.config import HEADS, ConfigError

_GIB = 1 << 30


@dataclass(frozen=True)
class Layout:
    """CUDA device indices as this process sees them; the drafter's is None where nothing is drafted."""

    target: tuple[int, ...]
    drafter: int | None

    @property
    def shared(self) -> bool:
        """Whether the drafter runs on one of the target's devices."""
        return self.drafter in self.target

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return len({*self.target, self.drafter} - {None})

    def describe(self) -> str:
        """One line for the log."""
        target = f"target on {_names(self.target)}"
        return target if self.drafter is None else f"{target}, drafter on cuda:{self.drafter}"


def place(tensor_parallel_size: int, drafter_device: int | None, num_devices: int, *, drafts: bool) -> Layout:
    """The target on the first devices, the drafter on the one named or on the next. Raises ConfigError where a device is missing."""
    target = tuple(range(tensor_parallel_size))
    if not drafts:
        return Layout(target, None)
    drafter = tensor_parallel_size if drafter_device is None else drafter_device
    if drafter >= num_devices:
        advice = (
            "with --drafter-device 0 it shares a device with the target"
            if drafter_device is None
            else f"name a device from 0 to {num_devices - 1}"
        )
        raise ConfigError(
            f"--drafter-device: the drafter should run on cuda:{drafter}, but this process sees {num_devices} CUDA device(s); {advice}"
        )
    return Layout(target, drafter)


def longest_context(method: str, draft_len: int, target_len: int) -> int:
    """The longest context that is drafted for, in tokens.

    A head takes the target's positions: vLLM stretches its position embedding to the target's length, whatever its own file says.
    """
    return target_len if method in HEADS else min(draft_len, target_len)


@dataclass(frozen=True)
class Reserve:
    """What the hidden states of jobs take, in bytes: on the device of the target's first rank and on the drafter's."""

    target: int = 0
    drafter: int = 0


@dataclass(frozen=True)
class Budget:
    """Memory of one device for one KV cache, in bytes."""

    available: int
    bytes_per_block: int

    @property
    def num_blocks(self) -> int:
        """Blocks that fit."""
        return max(0, self.available) // self.bytes_per_block

    def describe(self, name: str) -> str:
        """One line for the log."""
        return f"{name}: {self.available / _GIB:.2f} GiB for KV, {self.bytes_per_block} bytes a block, room for {self.num_blocks} blocks"


def common_blocks(target: Budget, drafter: Budget, *, shared: bool) -> int:
    """Blocks that both caches can have. `shared`: both come out of the target's memory."""
    if shared:
        return max(0, target.available) // (target.bytes_per_block + drafter.bytes_per_block)
    return min(target.num_blocks, drafter.num_blocks)


def check_blocks(num_blocks: int, block_size: int, max_model_len: int, drafter_device: int) -> None:
    """Raise ConfigError where the drafter's cache cannot hold one request of `max_model_len` tokens."""
    needed = -(-max_model_len // block_size) + 1
    if num_blocks < needed:
        raise ConfigError(
            f"the KV caches of target and drafter fit {num_blocks} blocks of {block_size} tokens, one request of {max_model_len} tokens "
            f"needs {needed}: lower --max-model-len to {max(1, num_blocks - 1) * block_size} or less, raise --gpu-memory-utilization, "
            f"or give the drafter another device than cuda:{drafter_device} with --drafter-device"
        )


def check_fit(wanted: int, free: int, num_blocks: int, drafter_device: int) -> None:
    """Raise ConfigError where the drafter's KV cache of `wanted` bytes does not fit into the `free` bytes of its device."""
    if wanted > free:
        raise ConfigError(
            f"the drafter's KV cache follows the target's {num_blocks} blocks and needs {wanted / _GIB:.2f} GiB on cuda:{drafter_device}, "
            f"where {free / _GIB:.2f} GiB are free: lower --num-gpu-blocks-override or --kv-cache-memory-bytes, or free that device"
        )


def _names(devices: tuple[int, ...]) -> str:
    return ", ".join(f"cuda:{device}" for device in devices)
