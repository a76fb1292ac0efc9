"""When the devices did what, without a synchronisation: kernels stamp the device's own clock into pinned memory, which the CPU reads later.

Device clocks are brought to the host's monotonic clock. A probe is a stamp that the CPU launches on a stream of its own and whose launch
it notes: a probe's stamp less its launch is the offset plus a latency of some microseconds, so the least of recent ones is the offset,
with about the same error on every device.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from minedraft_core.types import Lookahead

_RING = 4096
_PROBE_EVERY = 4
_PROBES = 32
_PROBE_AGE_NS = 5_000_000_000
_NS_PER_US = 1000


@triton.jit(do_not_specialize=["index"])
def _stamp_kernel(log, index):
    tl.store(log + index, globaltimer())


class StampLog:
    """A ring of time stamps of one device, in pinned memory. Index i stands for i modulo the ring's length."""

    def __init__(self, device: torch.device, size: int = _RING) -> None:
        self._size = size
        with torch.cuda.device(device):
            self._host = torch.zeros(size, dtype=torch.int64, pin_memory=True)
            self._view = get_accelerator_view_from_cpu_tensor(self._host)
        self._values: np.ndarray = self._host.numpy()

    def stamp(self, index: int) -> None:
        """Stamp the time at which the current stream of the current device gets here."""
        self._values[index % self._size] = 0
        _stamp_kernel[(1,)](self._view, index % self._size)

    def read(self, index: int) -> int:
        """The stamp in nanoseconds of the device's clock, 0 while it has not been reached."""
        return int(self._values[index % self._size])


@dataclass
class DeviceClock:
    """The offset of a device's clock from the host's, from probes. All times are nanoseconds."""

    offset_ns: int = 0

    def __post_init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=_PROBES)

    def add(self, launched_ns: int, stamp_ns: int) -> None:
        """Take in a probe: the host's time of its launch and its stamp."""
        self._recent.append((launched_ns, stamp_ns - launched_ns))
        while self._recent[0][0] < launched_ns - _PROBE_AGE_NS:
            self._recent.popleft()
        self.offset_ns = min(offset for _, offset in self._recent)

    def host_us(self, stamp_ns: int) -> int:
        """A stamp on the host's monotonic clock, in microseconds."""
        return (stamp_ns - self.offset_ns) // _NS_PER_US


class DeviceTimer:
    """Stamps of one device, and its clock."""

    def __init__(self, device: torch.device) -> None:
        self.log = StampLog(device)
        self.clock = DeviceClock()
        self._device = device
        self._probes = StampLog(device, _PROBES)
        self._launched: deque[tuple[int, int]] = deque()
        self._count = 0
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)

    def calibrate(self) -> None:
        """Find the offset at the start. Waits for the device."""
        for _ in range(_PROBES):
            self._probe()
            self._stream.synchronize()
            self._collect()

    def tick(self) -> None:
        """Keep the offset up to date; call once a step. Never waits."""
        self._count += 1
        if self._count % _PROBE_EVERY == 0:
            self._collect()
            if len(self._launched) < _PROBES // 2:
                self._probe()

    def _probe(self) -> None:
        index = self._count_probe()
        with torch.cuda.stream(self._stream):
            launched = time.monotonic_ns()
            self._probes.stamp(index)
        self._launched.append((index, launched))

    def _count_probe(self) -> int:
        return self._launched[-1][0] + 1 if self._launched else 0

    def _collect(self) -> None:
        while self._launched and (stamp := self._probes.read(self._launched[0][0])):
            _, launched = self._launched.popleft()
            self.clock.add(launched, stamp)

    def host_us(self, index: int) -> int | None:
        """A stamp of the log on the host's clock in microseconds, None while it has not been reached."""
        stamp = self.log.read(index)
        return self.clock.host_us(stamp) if stamp else None


@dataclass(frozen=True)
class DraftTimes:
    """One draft job whose drafts were handed to the target, `num_drafts` for each request. Microseconds on the host's clock."""

    number: int
    start_us: int
    end_us: int
    num_reqs: int
    num_drafts: int


@dataclass(frozen=True)
class PassTimes:
    """One pass of the target, from the moment its drafts were at hand to the sampling of its last token. Microseconds on the host's clock.

    `gap_us` is the time since the bookkeeping of the pass before was done, `wait_us` what part of it was spent waiting for drafts.
    `drafts` are the jobs that landed for this pass, `ahead` what these found of tokens drafted ahead.
    """

    start_us: int
    end_us: int
    gap_us: int | None
    wait_us: int
    drafts: tuple[DraftTimes, ...]
    ahead: tuple[Lookahead, ...] = ()


@dataclass(frozen=True)
class JobTicket:
    """Where the stamps of a draft job lie."""

    number: int
    num_reqs: int
    num_drafts: int = 0

    @property
    def begin(self) -> int:
        """Index of the stamp at its start."""
        return 2 * self.number

    @property
    def end(self) -> int:
        """Index of the stamp at its end."""
        return 2 * self.number + 1


@dataclass(frozen=True)
class PassTicket:
    """Where the stamps of a pass lie, and which jobs landed for it."""

    number: int
    jobs: tuple[JobTicket, ...]

    @property
    def reached(self) -> int:
        """Index of the stamp before the wait for drafts."""
        return 4 * self.number

    @property
    def begin(self) -> int:
        """Index of the stamp after it."""
        return 4 * self.number + 1

    @property
    def end(self) -> int:
        """Index of the stamp after sampling."""
        return 4 * self.number + 2

    @property
    def packed(self) -> int:
        """Index of the stamp after bookkeeping, when the next pass can begin."""
        return 4 * self.number + 3


class PassTimer:
    """The timers of the target's device and of the drafter's, and how tickets turn into times."""

    def __init__(self, target: DeviceTimer, drafter: DeviceTimer | None) -> None:
        self._target, self._drafter = target, drafter

    def read(self, ticket: PassTicket) -> PassTimes | None:
        """The times of a pass that has delivered its tokens; None where a stamp is missing."""
        reached, begin, end = (self._target.host_us(index) for index in (ticket.reached, ticket.begin, ticket.end))
        if reached is None or begin is None or end is None:
            return None
        before = self._target.host_us(ticket.packed - 4) if ticket.number else None
        return PassTimes(
            start_us=begin,
            end_us=end,
            gap_us=None if before is None else max(0, begin - before),
            wait_us=max(0, begin - reached),
            drafts=tuple(times for job in ticket.jobs if (times := self._read_job(job)) is not None),
        )

    def _read_job(self, job: JobTicket) -> DraftTimes | None:
        assert self._drafter is not None
        begin, end = self._drafter.host_us(job.begin), self._drafter.host_us(job.end)
        return None if begin is None or end is None else DraftTimes(job.number, begin, end, job.num_reqs, job.num_drafts)
