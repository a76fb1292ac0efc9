"""Runs the target on the cores that the pipeline gives it: in the engine core's own process, or split over processes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from vllm.config import VllmConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from minedraft_core.config import PipelineConfig

_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


class InProcessExecutor(UniProcExecutor):
    """vLLM's single-process executor on the cores that the pipeline gives the target.

    vLLM's CPU default gives the worker a process of its own, for which the engine core waits in a busy loop: that takes a share of the
    drafter's core and a millisecond a step. Within one process a step is a function call.
    """

    def _init_executor(self) -> None:
        cores = _target_cores(self.vllm_config)
        if cores:
            # Threads that OpenMP starts from here on inherit the mask; there is one for each core.
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
        super()._init_executor()


class SplitExecutor(MultiprocExecutor):
    """vLLM's executor with a process for each part of the target (tensor parallelism), which share the target's cores.

    Every part gets the drafts with the step that the scheduler sends to all, and draws the same tokens from the same gathered logits.
    """

    def _init_executor(self) -> None:
        cores = _target_cores(self.vllm_config) or sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores)
        # Left alone, vLLM asks for a NUMA node for each part.
        os.environ[_BINDING] = "|".join(",".join(map(str, part)) for part in cores_of_parts(cores, self.parallel_config.world_size))
        super()._init_executor()

    def shutdown(self) -> None:
        """End all parts."""
        if getattr(self, "is_failed", False):
            # One is gone, and the others wait for it in the midst of a pass, where they hear nothing.
            for part in self.workers:
                part.proc.kill()
        super().shutdown()


def cores_of_parts(cores: Sequence[int], parts: int) -> list[Sequence[int]]:
    """The cores of each part, in turn; where there are fewer cores than parts, several parts share one."""
    if len(cores) < parts:
        return [[cores[part % len(cores)]] for part in range(parts)]
    return [cores[len(cores) * part // parts : len(cores) * (part + 1) // parts] for part in range(parts)]


def _target_cores(vllm_config: VllmConfig) -> tuple[int, ...]:
    return PipelineConfig.model_validate(vllm_config.additional_config["minedraft"]).target_cores
