"""What became of the tokens that were drafted ahead on a GPU, read without a synchronisation."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from minedraft_core.types import Lookahead, Span
from minedraft_core.vllm.gpu.chain_kernels import TALLIES
from minedraft_core.vllm.gpu.timing import DeviceTimer, JobTicket, PassTicket, PassTimer, PassTimes, StampLog

_KEPT_JOBS = 1024


class AheadLog:
    """What jobs decided about the tokens drafted ahead before them, and when those were drafted. Never waits."""

    def __init__(self, timer: DeviceTimer, device: torch.device) -> None:
        self._timer = timer
        self._stamps = StampLog(device, _KEPT_JOBS)
        with torch.cuda.device(device):
            self._host = torch.zeros(_KEPT_JOBS, TALLIES, dtype=torch.int64, pin_memory=True)
            self.tallies = get_accelerator_view_from_cpu_tensor(self._host)
        self._steps = [0] * _KEPT_JOBS

    @staticmethod
    def row(number: int) -> int:
        """The row of `tallies` that a job fills."""
        return number % _KEPT_JOBS

    def begin(self, number: int) -> None:
        """A job is about to be enqueued."""
        self._host[self.row(number)] = 0

    def end(self, number: int, steps: int) -> None:
        """So many steps ahead were enqueued after a job: stamp their end on the current stream."""
        self._steps[self.row(number)] = steps
        self._stamps.stamp(number)

    def read(self, job: JobTicket) -> Lookahead | None:
        """What the job decided, with the time of the steps ahead before it. None where there were none, or a stamp is missing."""
        hits, misses, discarded, _ = self._host[self.row(job.number)].tolist()
        if not job.number:
            return None
        before = JobTicket(job.number - 1, 0)
        steps = self._steps[self.row(before.number)]
        begin = self._timer.host_us(before.end) if steps or hits or misses else None
        if begin is None:
            return None
        stamp = self._stamps.read(before.number) if steps else 0
        # The steps of a draft make a chain that goes on longer, too: then there is something to tell, and no time of its own.
        return Lookahead(hits, misses, discarded, Span(begin, self._timer.clock.host_us(stamp) if stamp else begin))


class LookaheadTimer(PassTimer):
    """Adds to a pass's times what became of the tokens drafted ahead."""

    def __init__(self, target: DeviceTimer, drafter: DeviceTimer, log: AheadLog) -> None:
        super().__init__(target, drafter)
        self._log = log

    def read(self, ticket: PassTicket) -> PassTimes | None:
        """The times of a pass that has delivered its tokens; None where a stamp is missing."""
        times = super().read(ticket)
        if times is None:
            return None
        return replace(times, ahead=tuple(found for job in ticket.jobs if (found := self._log.read(job)) is not None))
