"""vLLM's GPU worker with the pipeline's model runner."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from minedraft_core.config import ConfigError
from minedraft_core.vllm.gpu.runner import MineDraftModelRunner
from minedraft_core.vllm.parts import follow_engine


class MineDraftWorker(Worker):
    """One rank of the target. Rank 0 also drives the drafter's device."""

    model_runner: MineDraftModelRunner

    def init_device(self) -> None:
        """Prepare the rank's device."""
        follow_engine(self.parallel_config)
        super().init_device()

    def _make_model_runner(self) -> MineDraftModelRunner:
        if not self.use_v2_model_runner:
            raise ConfigError("the pipeline needs vLLM's V2 model runner: remove VLLM_USE_V2_MODEL_RUNNER=0, or see vLLM's warning above")
        parallel = self.parallel_config
        for flag, size in (
            ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
            ("--data-parallel-size", parallel.data_parallel_size),
            ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
            ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
        ):
            if size > 1 and self.speculative_config is not None:
                raise ConfigError(f"{flag} must be 1 beside a drafter, not {size}; --tensor-parallel-size is possible")
        if self.speculative_config is not None:
            if self.model_config.enable_sleep_mode:
                raise ConfigError("--enable-sleep-mode: the drafter's memory cannot be put to sleep; remove it")
            if self.vllm_config.watermark_config is not None:
                raise ConfigError("--watermark-config: the drafter does not write watermarks; remove it, or serve without a drafter")
        return MineDraftModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Bytes for the target's KV cache, after the drafter's share."""
        available = super().determine_available_memory()
        self.available_kv_cache_memory_bytes = self.model_runner.share_memory(available)
        return self.available_kv_cache_memory_bytes

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Capture the drafter's graphs before the target's, whose warm-up then runs the whole pipeline."""
        self.model_runner.prepare_pipeline()
        times = super().compile_or_warm_up_model()
        self.model_runner.check_pipeline()
        return times
