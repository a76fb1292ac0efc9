"""vLLM's CPU worker with exact verification."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from minedraft_core.vllm.cpu.sampler import MatchingSampler, all_processors
from minedraft_core.vllm.parts import follow_engine

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lies on Linux


class MineDraftCPUWorker(CPUWorker):
    """Gives vLLM's runner our sampler, and all of vLLM's logits processors."""

    def init_device(self) -> None:
        """Build vLLM's runner, then replace its verification."""
        follow_engine(self.parallel_config)
        super().init_device()
        if self._split:
            _unname_shared_memory(os.environ["VLLM_DIST_IDENT"])
        runner = self.model_runner
        if self.vllm_config.speculative_config is None:
            return
        if self.vllm_config.reasoning_config is not None:
            raise ValueError(
                "a reasoning budget cannot be kept while drafts are verified on CPU: drop the reasoning or the speculative configuration"
            )
        runner.rejection_sampler = MatchingSampler(runner.sampler)
        runner.input_batch.logitsprocs = all_processors(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Prepare the model, after which the parts of a split target have met for good."""
        times = super().compile_or_warm_up_model()
        if self._split:
            self._rendezvous.unlink(missing_ok=True)
        return times

    def shutdown(self) -> None:
        """End the runner; a part of a split target is then about to end its process too."""
        super().shutdown()
        if self._split:
            atexit.register(_end_at_once, self._rendezvous)

    @property
    def _split(self) -> bool:
        return bool(self.parallel_config.world_size > 1)

    @property
    def _rendezvous(self) -> Path:
        return Path(self.distributed_init_method.removeprefix("file://"))


def _unname_shared_memory(instance: str) -> None:
    """Delete the files of the memory that the parts of a target share.

    Every part has it mapped by now, and the system frees it with the last of them, however these end. With its name it would stay behind
    where a part is killed.
    """
    for path in _SHARED_MEMORY.glob(f"{instance}-*-cpushm_*"):
        path.unlink(missing_ok=True)


def _end_at_once(rendezvous: Path) -> None:
    """End this process without taking the interpreter apart, as a forked process ends.

    That takes seconds, longer where parts share a core, and vLLM kills a part that is not gone after five.
    """
    # torch made it anew as it took leave of the other parts.
    rendezvous.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
