"""What travels between the scheduler and the worker beside vLLM's own: how far to draft ahead, and a pass's times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from minedraft_core.types import DrafterRecord
from minedraft_core.vllm.gpu.timing import PassTimes


@dataclass
class PacedOutput(SchedulerOutput):
    """What the scheduler of a lookahead pipeline sends. `steps_ahead`: draft steps that follow the draft which this pass orders."""

    steps_ahead: int = 0


@dataclass
class TimedOutput(ModelRunnerOutput):
    """What the scheduler gets from rank 0. `times` is None where a stamp is missing; `failure` is set once, when the drafter has failed."""

    times: PassTimes | None = None
    failure: DrafterRecord | None = None


class TimedAsyncOutput(AsyncModelRunnerOutput):
    """Adds the times to vLLM's output once that has arrived; the stamps were written before it."""

    def __init__(self, inner: AsyncModelRunnerOutput, times: Callable[[], PassTimes | None], failure: DrafterRecord | None) -> None:
        self._inner, self._times, self._failure = inner, times, failure

    def get_output(self) -> ModelRunnerOutput:
        """Wait for vLLM's output."""
        return TimedOutput(**vars(self._inner.get_output()), times=self._times(), failure=self._failure)
