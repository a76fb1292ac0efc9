"""From the pipeline's configuration to vLLM's engine arguments, and from these to an engine."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from minedraft_core.checkpoint import check_checkpoint, tokens_apart
from minedraft_core.config import HEADS, ConfigError, DrafterConfig, PipelineConfig
from minedraft_core.types import Mode
from minedraft_core.vllm.additional import with_own
from minedraft_core.vllm.cpu.executor import InProcessExecutor, SplitExecutor

_logger = logging.getLogger("minedraft.pipeline")

_RESERVED = ("speculative_config", "scheduler_cls", "worker_cls")
_UNREAD = "dummy"  # of --load-format
_PARTS_ON_CPU = (1, 2, 3, 4, 8)
_CPU = "minedraft_core.vllm.cpu"
_GPU = "minedraft_core.vllm.gpu"


def runs_on_cpu() -> bool:
    """Whether vLLM runs on CPU here, or on CUDA."""
    return bool(current_platform.is_cpu())


def engine_parser(command: str, advice: str) -> FlexibleArgumentParser:
    """A parser of vLLM's engine flags. It raises ConfigError for what it does not know, and ends the message with `advice`."""

    class EngineParser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"{message}; {advice}")

    return AsyncEngineArgs.add_cli_args(EngineParser(prog=command, add_help=False, allow_abbrev=False))


def with_pipeline(args: AsyncEngineArgs, config: PipelineConfig) -> AsyncEngineArgs:
    """vLLM's arguments with the pipeline in place. Raises ConfigError where the two contradict each other."""
    reserved = (*_RESERVED, "distributed_executor_backend") if runs_on_cpu() else _RESERVED
    for name in reserved:
        if getattr(args, name) not in (None, "auto"):
            raise ConfigError(f"--{name.replace('_', '-')} is set by MineDraft: remove it")
    if config.speculative.model is not None:
        # The draft process on CPU reads weights whatever the target does.
        _check_model("--speculative-config: 'model'", config.speculative.model, read=runs_on_cpu() or args.load_format != _UNREAD)
        if apart := tokens_apart(Path(args.model).expanduser(), Path(config.speculative.model).expanduser()):
            _logger.warning(
                "The drafter's tokenizer is not the target's: %d of its tokens have other numbers there, so few drafts will be right", apart
            )
    if runs_on_cpu():
        return _on_cpu(args, config)
    if current_platform.is_cuda():
        return _on_cuda(args, config)
    raise ConfigError(f"the pipeline runs on CPU and on CUDA, not on {current_platform.device_name}")


def _on_cuda(args: AsyncEngineArgs, config: PipelineConfig) -> AsyncEngineArgs:
    if config.target_cores or config.drafter.cores:
        raise ConfigError("--target-cores and --drafter-cores are for the CPU backend: remove them; on GPUs see --drafter-device")
    if args.async_scheduling is False:
        raise ConfigError("--no-async-scheduling: the pipeline on GPUs needs asynchronous scheduling; remove it")
    config.speculative.check_on_gpus()
    _check_kernels(config)
    if args.device_ids and config.speculative.mode is not Mode.OFF:
        raise ConfigError("--device-ids: beside a drafter the target has the first devices; choose them with CUDA_VISIBLE_DEVICES instead")
    if config.speculative.tetris and args.enforce_eager:
        raise ConfigError("--enforce-eager: 'tetris' needs CUDA graphs of the target on GPUs; remove one of the two")
    changes: dict[str, Any] = {
        "scheduler_cls": f"{_GPU}.scheduler.MineDraftAsyncScheduler",
        "worker_cls": f"{_GPU}.worker.MineDraftWorker",
        "async_scheduling": True,
        "additional_config": with_own(args.additional_config, config),
    }
    if config.speculative.mode is not Mode.OFF:
        changes["speculative_config"] = draft_model_speculation(config)
    return replace(args, **changes)


def _check_kernels(config: PipelineConfig) -> None:
    fused = config.drafter.fused
    if config.drafter.weights == "fp8":
        if fused not in ("auto", "layers"):
            raise ConfigError("--drafter-weights fp8 needs --drafter-fused layers, whose kernels read them")
        fused = "layers"
    if fused == "layers" and config.speculative.method in HEADS:
        raise ConfigError("--drafter-fused layers and --drafter-weights fp8 are for draft models: remove them with a head")
    if fused == "layers" and config.drafter.compiled:
        raise ConfigError(
            "--drafter-compiled compiles what the kernels of --drafter-fused layers and --drafter-weights fp8 replace: remove it or them"
        )


def natively(args: AsyncEngineArgs, config: PipelineConfig) -> AsyncEngineArgs:
    """vLLM's own speculative decoding with the same models, for comparison: only the scheduler, which records the passes, is ours."""
    return replace(
        args,
        scheduler_cls=f"{_GPU}.scheduler.MineDraftAsyncScheduler",
        async_scheduling=True,
        speculative_config=draft_model_speculation(config),
        additional_config=with_own(args.additional_config, config),
    )


def draft_model_speculation(config: PipelineConfig) -> dict[str, Any]:
    """vLLM's speculative configuration for a drafter on GPUs; vLLM then checks that the two fit together."""
    speculation: dict[str, Any] = {
        "method": config.speculative.method or "draft_model",
        "model": config.speculative.model,
        "num_speculative_tokens": config.speculative.longest_draft,
        "draft_tensor_parallel_size": 1,
        "draft_sample_method": "probabilistic",
    }
    if config.speculative.tetris:
        # vLLM then prepares for batches that are trimmed on the device.
        speculation["enable_adaptive_verification"] = True
    if config.drafter.synthetic_acceptance_length is not None:
        speculation |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": config.drafter.synthetic_acceptance_length,
        }
    if (acceptance := config.drafter.synthetic_acceptance) is not None:
        rates = [acceptance**position for position in range(1, config.speculative.longest_draft + 1)]
        speculation |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return speculation


def _on_cpu(args: AsyncEngineArgs, config: PipelineConfig) -> AsyncEngineArgs:
    config.speculative.check_on_cpu()
    if config.drafter.device is not None:
        raise ConfigError("--drafter-device is for GPUs: remove it; on CPU see --drafter-cores")
    for name in ("compiled", "fused", "weights"):
        if getattr(config.drafter, name) != DrafterConfig.model_fields[name].default:
            raise ConfigError(f"--drafter-{name} is for GPUs: remove it")
    if config.drafter.synthetic_acceptance_length is not None or config.drafter.synthetic_acceptance is not None:
        raise ConfigError("synthetic acceptance is for GPUs; on CPU replay what plain decoding wrote")
    if args.enable_chunked_prefill:
        raise ConfigError("--enable-chunked-prefill: vLLM's CPU backend fails on seeded requests with chunked prefill; remove it")
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") not in ("auto", "nobind"):
        raise ConfigError("VLLM_CPU_OMP_THREADS_BIND: the target does not read it here; name its cores with --target-cores")
    if args.pipeline_parallel_size > 1:
        raise ConfigError("--pipeline-parallel-size must be 1 on CPU; --tensor-parallel-size is possible")
    if args.tensor_parallel_size not in _PARTS_ON_CPU:
        parts = ", ".join(map(str, _PARTS_ON_CPU))
        raise ConfigError(f"--tensor-parallel-size: vLLM's CPU backend adds up {parts} parts only, not {args.tensor_parallel_size}")
    changes: dict[str, Any] = {
        "scheduler_cls": f"{_CPU}.scheduler.MineDraftScheduler",
        "worker_cls": f"{_CPU}.worker.MineDraftCPUWorker",
        "distributed_executor_backend": InProcessExecutor if args.tensor_parallel_size == 1 else SplitExecutor,
        "enable_chunked_prefill": False,
        "additional_config": with_own(args.additional_config, config),
    }
    if config.speculative.mode is not Mode.OFF:
        changes["speculative_config"] = {
            "method": "custom_class",
            "model": f"{_CPU}.proposer.NoProposer",
            "num_speculative_tokens": config.speculative.longest_draft,
        }
    return replace(args, **changes)


def _check_model(key: str, model: str, *, read: bool) -> None:
    """A path where nothing is would be taken for the name of a model on a hub; a folder whose weights are read must hold what it says."""
    path = Path(model).expanduser()
    if model.startswith(("/", "./", "../", "~")) and not path.exists():
        raise ConfigError(f"{key}: there is nothing at {model}")
    if read and path.is_dir():
        check_checkpoint(key, path)


def start_engine(args: AsyncEngineArgs) -> AsyncLLM:
    """A running engine. Raises ConfigError, with vLLM's reason, where the arguments contradict each other or the engine does not start."""
    _check_model("--model", args.model, read=args.load_format != _UNREAD)
    try:
        config = args.create_engine_config()
    except ValidationError as error:
        faults = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
        raise ConfigError(f"the engine cannot be configured: {faults}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"the engine cannot be configured: {error}") from error
    try:
        return AsyncLLM.from_vllm_config(config, enable_log_requests=args.enable_log_requests, disable_log_stats=args.disable_log_stats)
    except RuntimeError as error:
        raise ConfigError(f"the engine did not start; its log above has the cause ({error})") from error
