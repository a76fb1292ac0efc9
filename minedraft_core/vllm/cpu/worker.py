"""vLLM's CPU worker with exact verification."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from minedraft_core.vllm.cpu.sampler import MatchingSampler, all_processors


class MineDraftCPUWorker(CPUWorker):
    """Gives vLLM's runner our sampler, and all of vLLM's logits processors."""

    def init_device(self) -> None:
        """Build vLLM's runner, then replace its verification."""
        super().init_device()
        runner = self.model_runner
        if self.vllm_config.speculative_config is None:
            return
        if self.vllm_config.reasoning_config is not None:
            raise ValueError(
                "a reasoning budget cannot be kept while drafts are verified on CPU: drop the reasoning or the speculative configuration"
            )
        runner.rejection_sampler = MatchingSampler(runner.sampler)
        runner.input_batch.logitsprocs = all_processors(self.vllm_config, self.device)
