"""Put together from the settings: embedded model, engine, feed, application; then serve."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import set_ulimit

from minedraft_core.config import ConfigError, MineDraftConfig, PipelineConfig
from minedraft_core.control import ControlClient
from minedraft_core.cores import Cores, check_cores, split_cores
from minedraft_core.embedded import CPU_DEFAULTS, KV_CACHE_BYTES, prepare
from minedraft_core.feed import FeedMessage, FeedReader, FeedWriter
from minedraft_core.gpus import take_gpus
from minedraft_core.metrics import PipelineMetrics, ServiceLevels
from minedraft_core.trace import TraceWriter
from minedraft_core.types import Mode
from minedraft_core.vllm.args import engine_parser, runs_on_cpu, start_engine, with_pipeline
from minedraft_core.vllm.logs import quieten
from server.admin import admin_router
from server.app import create_app
from server.dashboard import Dashboard, dashboard_router
from server.lifecycle import FLUSH_SECONDS, Lifecycle, bind, check_tls, serve
from server.logs import log_drafter
from server.rendering import check_chat
from server.settings import Settings

_logger = logging.getLogger("minedraft.server")

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_DEFAULTS = MappingProxyType({"max_model_len": 4096, "max_num_seqs": 16})
EMBEDDED_DRAFT_TOKENS = 4


def serve_parser() -> FlexibleArgumentParser:
    """A parser of vLLM's engine flags. It raises ConfigError for what it does not know."""
    return engine_parser("minedraft serve", "`minedraft serve --help` lists the own flags, `--help-engine` vLLM's")


async def run(settings: Settings, engine_arguments: Sequence[str]) -> int:
    """Serve until a signal or the engine's death; the exit code of the process.

    Raises ConfigError, or OSError where the address is taken, before anything is loaded.
    """
    # Each connection takes a file descriptor, and many systems grant 1024 unless asked for more.
    set_ulimit()
    with ExitStack() as stack:
        check_tls(settings)
        sock = stack.enter_context(bind(settings))
        if settings.free_gpus is not None:
            take_gpus(settings.free_gpus, os.environ, _logger.info)
        embedded = settings.model is None
        settings = with_embedded(settings)
        dashboard = Dashboard()
        reader, address, metrics = _open_feed(settings, stack, dashboard)
        cores = Cores(settings.target_cores, settings.drafter_cores)
        if runs_on_cpu():
            cores = share_cores(settings, sorted(os.sched_getaffinity(0)))
        config = PipelineConfig(
            speculative=settings.speculative_config or MineDraftConfig(),
            drafter=settings.drafter.model_copy(update={"cores": cores.drafter}),
            target_cores=cores.target,
            feed_address=address,
            control_address=f"{address}-control" if settings.enable_admin else None,
        )
        routers = _admin_routers(settings, config, stack)
        args = with_pipeline(read_engine_args(settings, engine_arguments, embedded=embedded), config)
        check_chat(settings, args.reasoning_parser)
        _set_environment(settings)
        _announce(settings, config)
        engine = start_engine(args)
        stack.callback(_logger.info, "the server has ended")
        stack.callback(engine.shutdown)
        reader.start()
        stack.callback(reader.close)
        feed = FeedWriter(address)
        stack.callback(feed.close)
        lifecycle = Lifecycle(engine, settings.drain_timeout)
        registries = [REGISTRY, metrics.registry]
        app = create_app(
            engine,
            settings,
            lifecycle=lifecycle,
            registries=registries,
            routers=[*routers, dashboard_router(dashboard, lambda: lifecycle.draining)],
            report=lambda record: feed.push([record]),
        )
        return await serve(app, lifecycle, settings, sock)


def with_embedded(settings: Settings) -> Settings:
    """The settings with the embedded model in place where none is named.

    A speculative configuration without a drafter then gets the embedded one; beside a model of one's own it is refused.
    """
    speculative = settings.speculative_config
    if settings.model is not None:
        if speculative is not None and speculative.num_speculative_tokens and speculative.model is None:
            raise ConfigError("--speculative-config: name a drafter with 'model'; only the embedded target brings one along")
        return settings
    models = prepare(settings.cache)
    speculative = speculative or MineDraftConfig(num_speculative_tokens=EMBEDDED_DRAFT_TOKENS, is_parallel=True)
    if speculative.num_speculative_tokens and speculative.model is None:
        speculative = speculative.model_copy(update={"model": str(models.draft)})
    changes: dict[str, Any] = {
        "model": str(models.target),
        "served_model_name": settings.served_model_name or (EMBEDDED_NAME,),
        "speculative_config": speculative,
    }
    return settings.model_copy(update=changes)


def read_engine_args(settings: Settings, arguments: Sequence[str], *, embedded: bool = False) -> AsyncEngineArgs:
    """vLLM's arguments for the model of the settings. Raises ConfigError for a flag or value that vLLM does not take.

    The `embedded` model has defaults of its own, which `arguments` override, and a small KV cache unless a flag or
    `VLLM_CPU_KVCACHE_SPACE` (vLLM's) sizes the memory.
    """
    names = ("--served-model-name", *settings.served_model_name) if settings.served_model_name else ()
    parser = serve_parser()
    if embedded:
        parser.set_defaults(**EMBEDDED_DEFAULTS, **(CPU_DEFAULTS if runs_on_cpu() else {}))
    args: AsyncEngineArgs = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(settings.model), *names, *arguments]))
    if settings.speculative_config is not None and settings.speculative_config.mode is not Mode.OFF:
        level = settings.per_request_spec_decode_metrics
        # A request may ask for the report at any time; counting costs an addition a step.
        args = replace(args, per_request_spec_decode_metrics="summary" if level == "none" else level)
    if args.structured_outputs_config.backend == "auto":
        # vLLM checks each request against every backend in turn, one of which unrolls counts until memory is gone, and then compiles all
        # requests with the backend of the first.
        args = replace(args, structured_outputs_config=replace(args.structured_outputs_config, backend="xgrammar"))
    if not args.shutdown_timeout:
        # A terminal and systemd send their signal to the engine's process too. It then finishes what runs, as the server does.
        args = replace(args, shutdown_timeout=math.ceil(settings.drain_timeout + FLUSH_SECONDS))
    if args.otlp_traces_endpoint is not None and args.disable_log_stats:
        raise ConfigError("--otlp-traces-endpoint: spans are made of vLLM's statistics, which --disable-log-stats turns off; remove one")
    sized = args.kv_cache_memory_bytes is not None or args.gpu_memory_utilization != AsyncEngineArgs.gpu_memory_utilization
    if not embedded or sized or "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return args
    return replace(args, kv_cache_memory_bytes=KV_CACHE_BYTES)


def share_cores(settings: Settings, available: Sequence[int]) -> Cores:
    """Cores of target and drafter, none shared; where nothing is drafted the target gets all. Raises ConfigError for impossible ones."""
    named = Cores(settings.target_cores, settings.drafter_cores)
    if settings.speculative_config is not None and settings.speculative_config.mode is not Mode.OFF:
        return split_cores(named, available)
    check_cores(named, available)
    return Cores(named.target or tuple(available), named.drafter)


def _admin_routers(settings: Settings, config: PipelineConfig, stack: ExitStack) -> list[APIRouter]:
    if config.control_address is None:
        return []
    if not settings.api_key:
        raise ConfigError("--enable-admin: name an API key with --api-key or --api-key-file, so that not everybody changes the mode")
    control = ControlClient(config.control_address)
    stack.callback(control.close)
    return [admin_router(control, settings.max_body_bytes)]


def _open_feed(settings: Settings, stack: ExitStack, dashboard: Dashboard) -> tuple[FeedReader, str, PipelineMetrics]:
    levels = ServiceLevels(
        *(None if limit is None else limit / 1000 for limit in (settings.slo_ttft_ms, settings.slo_tpot_ms, settings.slo_e2e_ms))
    )
    speculative = settings.speculative_config or MineDraftConfig()
    metrics = PipelineMetrics(levels, speculative.longest_draft)
    sinks: list[Callable[[FeedMessage], None]] = [metrics, log_drafter, dashboard]
    if settings.trace is not None:
        try:
            trace = TraceWriter(settings.trace)
        except OSError as error:
            raise ConfigError(f"--trace: {settings.trace} cannot be written: {error.strerror}") from None
        stack.callback(trace.close)
        sinks.append(trace)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="minedraft-"))
    address = f"ipc://{folder}/feed"
    return FeedReader(address, sinks), address, metrics


def _announce(settings: Settings, config: PipelineConfig) -> None:
    names = settings.served_model_name or (str(settings.model),)
    fields = {
        "num_speculative_tokens": config.speculative.num_speculative_tokens,
        "num_speculative_tokens_per_batch_size": config.speculative.num_speculative_tokens_per_batch_size,
        "target_cores": config.target_cores or None,
        "drafter_cores": config.drafter.cores or None,
    }
    _logger.info("loading %s in mode %s", ", ".join(names), config.speculative.mode.value, extra={"fields": fields})


def _set_environment(settings: Settings) -> None:
    # vLLM reads these when its processes start.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # At its level "info" vLLM fills screens; its warnings are enough beside our own lines.
    if settings.log_level in {"debug", "error"}:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", settings.log_level.upper())
    quieten(os.environ, on_cpu=runs_on_cpu())
