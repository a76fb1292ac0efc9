"""Runs the target in the engine core's own process.

vLLM's CPU default gives the worker a process of its own, for which the engine core waits in a busy loop: that takes a share of the
drafter's core and a millisecond a step. Within one process a step is a function call.
"""

from __future__ import annotations

import os

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from minedraft_core.config import PipelineConfig


class InProcessExecutor(UniProcExecutor):
    """vLLM's single-process executor on the cores that the pipeline gives the target."""

    def _init_executor(self) -> None:
        cores = PipelineConfig.model_validate(self.vllm_config.additional_config["minedraft"]).target_cores
        if cores:
            # Threads that OpenMP starts from here on inherit the mask; there is one for each core.
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
        super()._init_executor()
