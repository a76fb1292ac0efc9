"""The tables of a report: which columns they have, what these mean, and their cells as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minedraft_core.report.arms import MeasuredArm, model_name
from minedraft_core.report.figures import Spread
from minedraft_core.report.verdict import Choice

Value = str | int | float | None


@dataclass(frozen=True)
class Column:
    """One column: its heading, the value of an arm, the digits shown and what it means."""

    name: str
    value: Callable[[MeasuredArm], Value]
    digits: int = 0
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose cells are text already."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _times(name: str, of: Callable[[MeasuredArm], Spread | None], meaning: str) -> tuple[Column, ...]:
    """p50, p90 and p99 of a time in milliseconds."""

    def part(share: str) -> Callable[[MeasuredArm], Value]:
        def value(arm: MeasuredArm) -> Value:
            spread = of(arm)
            return None if spread is None else float(getattr(spread, share))

        return value

    return tuple(Column(f"{name} {share} ms", part(share), 1, meaning) for share in ("p50", "p90", "p99"))


def _p50(name: str, of: Callable[[MeasuredArm], Spread | None], meaning: str) -> Column:
    return Column(f"{name} ms", lambda arm: None if (spread := of(arm)) is None else spread.p50, 2, meaning)


IDENTITY = (
    Column("target", lambda arm: model_name(arm.header.target)),
    Column("draft", lambda arm: model_name(arm.header.draft) or None),
    Column("prompts", lambda arm: arm.header.dataset),
    Column("n", lambda arm: arm.header.n, meaning="Samples of each prompt; each one counts as a request."),
    Column("load", lambda arm: arm.header.load, meaning="Requests that run at once at most, both sides together."),
    Column("arm", lambda arm: arm.label, meaning="Mode and draft tokens a step; k=3+1 is TETRIS with 1 extra proposal."),
    Column("drafts judged", lambda arm: arm.header.acceptance or ("by the target" if arm.header.k else None)),
)

THROUGHPUT = (
    Column("tok/s", lambda arm: arm.figures.tokens_per_second, 1, "Output tokens of all requests over the makespan; median of the runs."),
    Column("tok/s min", lambda arm: min(arm.figures.tokens_per_second_runs, default=None), 1, "The slowest run's tokens per second."),
    Column("tok/s max", lambda arm: max(arm.figures.tokens_per_second_runs, default=None), 1, "The fastest run's tokens per second."),
    Column("tok/s/GPU", lambda arm: arm.figures.tokens_per_second_per_gpu, 1, "tok/s over the CUDA devices in use, the drafter's too."),
    Column("GPUs", lambda arm: arm.header.gpus or None, 0, "CUDA devices in use."),
    Column("req/s", lambda arm: arm.figures.requests_per_second, 2, "Finished requests over the makespan; median of the runs."),
    Column(
        "decode tok/s",
        lambda arm: arm.figures.decode_tokens_per_second,
        1,
        "Tokens of passes without a prompt over the time of these passes and the gaps before them: the published 'generation throughput', "
        "which leaves prefill out.",
    ),
    Column("makespan s", lambda arm: arm.figures.makespan_s, 2, "First arrival to last token of a run; the published 'total latency'."),
    Column(
        "makespan/req ms",
        lambda arm: arm.figures.makespan_per_request_ms,
        1,
        "Makespan over requests: the published 'latency'. No request takes this long; see the latency of requests.",
    ),
    Column("runs", lambda arm: arm.figures.runs, 0, "Measured runs; runs to warm up are left out."),
    Column("requests", lambda arm: arm.figures.requests, 0, "Finished requests of all runs."),
)

REQUESTS = (
    *_times("latency", lambda arm: arm.figures.latency, "Arrival to last token of each request. In an experiment all arrive at once."),
    *_times("TTFT", lambda arm: arm.figures.ttft, "Arrival to first token, waiting for a free place included."),
    *_times("wait", lambda arm: arm.figures.wait, "Arrival until the request is taken up."),
    *_times("execution", lambda arm: arm.figures.execution, "From being taken up to the last token."),
    _p50("TPOT", lambda arm: arm.figures.tpot, "Time per output token after the first; median over requests."),
    _p50(
        "outside passes",
        lambda arm: arm.figures.outside_passes,
        "Latency less the passes that held the request, as the original plugin defines wait; known for its traces only.",
    ),
)

PASSES = (
    _p50("step", lambda arm: arm.figures.step, "Median duration of a pass without prompts, from the end of scheduling to its output."),
    _p50("prompt step", lambda arm: arm.figures.prompt_step, "Median duration of a pass with prompts."),
    _p50("verify", lambda arm: arm.figures.verify, "Median time the target took for a pass without prompts."),
    _p50("draft", lambda arm: arm.figures.draft, "Median time the drafter worked on an answer; in parallel an answer is for one side."),
    _p50("gap", lambda arm: arm.figures.gap, "Median time the target was idle before a pass."),
    _p50("drafter wait", lambda arm: arm.figures.drafter_wait, "Median time a pass waited for its drafts."),
    _p50("overhead", lambda arm: arm.figures.overhead, "Median time of scheduling and bookkeeping for a pass."),
    Column("hidden", lambda arm: arm.figures.hidden_share, 2, "Time of drafting during passes of the target over all time of drafting."),
    Column("preempted", lambda arm: arm.figures.preempted, 0, "Requests that were preempted."),
)

SPECULATION = (
    Column("VSR", lambda arm: arm.figures.verification_success_rate, 3, "Verification success rate: accepted over verified draft tokens."),
    Column(
        "acceptance length", lambda arm: arm.figures.acceptance_length, 2, "1 + accepted tokens over visits: tokens a request gets a pass."
    ),
    Column("proposed", lambda arm: arm.figures.proposed, 0, "Draft tokens at hand when a pass was scheduled."),
    Column("verified", lambda arm: arm.figures.verified, 0, "Draft tokens verified."),
    Column("accepted", lambda arm: arm.figures.accepted, 0, "Draft tokens accepted."),
    Column("lookahead hits", lambda arm: arm.figures.lookahead_hits, 2, "Share of the drafts made ahead that could be used, in pearl."),
    Column(
        "by position",
        lambda arm: " ".join(f"{share:.2f}" for share in arm.figures.acceptance_by_position) or None,
        0,
        "Share of the drafts with a token at this position whose token there was accepted.",
    ),
)

ALL = (*IDENTITY, *THROUGHPUT, *REQUESTS, *PASSES, *SPECULATION)


def tables(arms: Sequence[MeasuredArm]) -> list[Table]:
    """The tables of the measured arms; a column without any value is left out."""
    ran = [arm for arm in arms if arm.header.refused is None]
    parts = (("Throughput", THROUGHPUT), ("Requests", REQUESTS), ("Passes and drafts", PASSES), ("Speculation", SPECULATION))
    return [_table(title, columns, ran) for title, columns in parts] if ran else []


def _table(title: str, columns: Sequence[Column], arms: Sequence[MeasuredArm]) -> Table:
    shown = [column for column in (*IDENTITY, *columns) if any(column.value(arm) is not None for arm in arms)]
    # What is the same in every row is said once, above the tables.
    shown = [column for column in shown if column not in IDENTITY or _differs(column, arms) or column.name in ("load", "arm")]
    return Table(
        title,
        tuple(column.name for column in shown),
        tuple(tuple(text(column.value(arm), column.digits) for column in shown) for arm in arms),
    )


def _differs(column: Column, arms: Sequence[MeasuredArm]) -> bool:
    values = {value for arm in arms if (value := column.value(arm)) is not None}
    return len(values) > 1


def common(arms: Sequence[MeasuredArm]) -> list[tuple[str, str]]:
    """What is the same for all arms that have it."""
    found = []
    for column in IDENTITY:
        values = {value for arm in arms if (value := column.value(arm)) is not None}
        if len(values) == 1 and column.name not in ("load", "arm"):
            found.append((column.name, text(values.pop(), column.digits)))
    return found


def choice_table(found: Sequence[Choice]) -> Table:
    """What to use at each load."""
    modes = list(dict.fromkeys(mode for choice in found for mode in choice.rates))
    with_gpus = any(choice.best_per_gpu for choice in found)
    heads = ("draft", "drafts judged", "prompts", "n", "load", "use", "x off", "x next", *(f"{mode} tok/s" for mode in modes))
    rows = tuple(
        (
            model_name(choice.draft),
            choice.acceptance or "by the target",
            choice.dataset,
            str(choice.n),
            str(choice.load),
            choice.words,
            text(choice.over_off, 2),
            text(choice.over_next, 2),
            *(text(choice.rates.get(mode), 1) for mode in modes),
            *((choice.best_per_gpu.label if choice.best_per_gpu else "",) if with_gpus else ()),
        )
        for choice in found
    )
    return Table("Which mode at which load", (*heads, *(("best per GPU",) if with_gpus else ())), rows)


def refused_table(arms: Sequence[MeasuredArm]) -> Table | None:
    """The arms that could not be run, equal reasons of one mode together."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for arm in arms:
        if arm.header.refused is not None:
            key = (arm.header.arm, model_name(arm.header.draft), arm.header.refused)
            found.setdefault(key, {})[arm.label] = None
    if not found:
        return None
    rows = tuple((mode, draft, ", ".join(labels), f"refused: {reason}") for (mode, draft, reason), labels in found.items())
    return Table("Arms that were refused", ("arm", "draft", "with", "reason"), rows)


def text(value: Value, digits: int) -> str:
    """A cell; empty where there is no value."""
    if value is None:
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def definitions() -> list[tuple[str, str]]:
    """What the columns mean, each once."""
    return [(column.name, column.meaning) for column in ALL if column.meaning]
