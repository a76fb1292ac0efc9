"""vLLM's models in a process without an engine."""

from __future__ import annotations

from pathlib import Path

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel


def stand_alone(config: VllmConfig, folder: Path, backend: str = "gloo") -> None:
    """Make the groups that models are built in, of this process alone, with a file in `folder`. Once in a process."""
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder / 'rendezvous'}", 0, backend=backend)
        initialize_model_parallel(1, 1)
