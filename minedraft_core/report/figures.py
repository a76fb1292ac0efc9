"""From a trace to the figures of a row. Pure functions; what a trace does not tell is None and named in `missing`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import TypeVar

import msgspec

from minedraft_core.acceptance import accepted_per_position
from minedraft_core.report.trace import Ahead, Drafted, Run, Step, Trace

_US = 1e-6
_MS = 1e-3
_T = TypeVar("_T")


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles of some times in milliseconds; a percentile is the smallest value that so many percent do not exceed."""

    mean: float
    p50: float
    p90: float
    p99: float


class BySize(msgspec.Struct, frozen=True):
    """Median time of the passes or answers over batches of one size, and how many there were."""

    requests: int
    median_ms: float
    count: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one arm over all its runs; `tables.py` says what they mean.

    Throughputs are medians over the runs, times are taken over all runs together, shares come from sums. Times are milliseconds.
    """

    runs: int
    requests: int | None = None
    makespan_s: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_runs: tuple[float, ...] = ()
    tokens_per_second_per_gpu: float | None = None
    requests_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    makespan_per_request_ms: float | None = None
    latency: Spread | None = None
    ttft: Spread | None = None
    wait: Spread | None = None
    execution: Spread | None = None
    outside_passes: Spread | None = None
    tpot: Spread | None = None
    step: Spread | None = None
    prompt_step: Spread | None = None
    verify: Spread | None = None
    draft: Spread | None = None
    gap: Spread | None = None
    drafter_wait: Spread | None = None
    overhead: Spread | None = None
    hidden_share: float | None = None
    proposed: int | None = None
    verified: int | None = None
    accepted: int | None = None
    verification_success_rate: float | None = None
    acceptance_length: float | None = None
    acceptance_by_position: tuple[float, ...] = ()
    lookahead_hits: float | None = None
    preempted: int | None = None
    verify_by_size: tuple[BySize, ...] = ()
    draft_by_size: tuple[BySize, ...] = ()
    missing: tuple[str, ...] = ()


def figures_of(trace: Trace) -> Figures:
    """The figures of a trace's runs."""
    runs = [run for run in trace.runs if run.steps or run.requests]
    steps = [step for run in runs for step in run.steps]
    requests = [request for run in runs for request in run.requests]
    decoding = [step for step in steps if not step.is_prompt_run]
    answers = [answer for run in runs for answer in run.drafted]
    ahead = [record for run in runs for record in run.ahead]
    served = [run for run in runs if run.requests]
    spans = [max(1, _makespan_us(run)) for run in served]
    rates = tuple(_tokens(run) / (span * _US) for run, span in zip(served, spans, strict=True))
    drafts = [pair for step in steps for pair in step.drafts or ()]
    drafted_at, accepted_at = accepted_per_position(drafts)
    verified, accepted = _sum(steps, lambda step: step.verify_len), _sum(steps, lambda step: step.accepted_num)
    visits = len(drafts) if drafts else sum(step.batched_requests or 0 for step in decoding if step.verify_len)
    drafting: list[Drafted | Ahead] = [*answers, *ahead]
    busy = sum(record.end_us - record.start_us for record in drafting)
    foreseen = sum(record.hits + record.misses for record in ahead)
    gpus, tokens_per_second = trace.header.gpus, _median(rates)
    figures = Figures(
        runs=len(runs),
        requests=len(requests) or None,
        makespan_s=_median([span * _US for span in spans]),
        tokens_per_second=tokens_per_second,
        tokens_per_second_runs=rates,
        tokens_per_second_per_gpu=tokens_per_second / gpus if gpus and tokens_per_second is not None else None,
        requests_per_second=_median([len(run.requests) / (span * _US) for run, span in zip(served, spans, strict=True)]),
        decode_tokens_per_second=_median([rate for run in runs if (rate := _decode_rate(run)) is not None]),
        makespan_per_request_ms=_median([span * _MS / len(run.requests) for run, span in zip(served, spans, strict=True)]),
        latency=_spread(request.end_us - request.start_us for request in requests),
        ttft=_spread(request.first_token_us - request.start_us for request in requests if request.first_token_us),
        wait=_spread(request.scheduled_us - request.start_us for request in requests if request.scheduled_us),
        execution=_spread(request.end_us - request.scheduled_us for request in requests if request.scheduled_us),
        outside_passes=_spread(
            max(0, request.end_us - request.start_us - request.in_passes_us) for request in requests if request.in_passes_us is not None
        ),
        tpot=_spread(
            (request.end_us - request.first_token_us) / (request.gen_len - 1)
            for request in requests
            if request.first_token_us and (request.gen_len or 0) > 1 and request.gen_len is not None
        ),
        step=_spread(step.end_us - step.start_us for step in decoding),
        prompt_step=_spread(step.end_us - step.start_us for step in steps if step.is_prompt_run),
        verify=_spread(target_us for step in decoding if (target_us := _target_us(step)) is not None),
        draft=_spread(_draft_times_us(runs)),
        gap=_spread(step.gap_us for step in decoding if step.gap_us is not None),
        drafter_wait=_spread(step.drafter_wait_us for step in decoding if step.drafter_wait_us is not None),
        overhead=_spread(step.measured_overhead_time / _US for step in decoding if step.measured_overhead_time is not None),
        hidden_share=sum(record.hidden_us or 0 for record in drafting) / busy if busy and _knows_hidden(drafting) else None,
        proposed=_sum(steps, lambda step: step.proposed_len),
        verified=verified,
        accepted=accepted,
        verification_success_rate=accepted / verified if verified and accepted is not None else None,
        acceptance_length=1 + accepted / visits if visits and accepted is not None else None,
        acceptance_by_position=tuple(right / count for count, right in zip(drafted_at, accepted_at, strict=True)),
        lookahead_hits=sum(record.hits for record in ahead) / foreseen if foreseen else None,
        preempted=_sum(steps, lambda step: step.preempted_requests),
        verify_by_size=_by_size((step.batched_requests, target_us) for step in decoding if (target_us := _target_us(step)) is not None),
        draft_by_size=_by_size((answer.batched_requests, answer.end_us - answer.start_us) for answer in answers),
    )
    return msgspec.structs.replace(figures, missing=_missing(figures, runs, steps))


def _makespan_us(run: Run) -> int:
    return max(request.end_us for request in run.requests) - min(request.start_us for request in run.requests)


def _tokens(run: Run) -> int:
    """Tokens that the requests got; where requests do not say, tokens that the passes delivered."""
    if any(request.gen_len is None for request in run.requests):
        return _sum(run.steps, lambda step: step.generated_num) or 0
    return sum(request.gen_len or 0 for request in run.requests)


def _decode_rate(run: Run) -> float | None:
    """Tokens of passes without a prompt over the time of these passes and of the gaps before them, per second."""
    tokens, time_us, before = 0, 0, None
    for step in run.steps:
        if not step.is_prompt_run and step.generated_num is not None:
            tokens += step.generated_num
            time_us += step.end_us - step.start_us + _gap_us(step, before)
        before = step.end_us
    return tokens / (time_us * _US) if tokens and time_us else None


def _gap_us(step: Step, before_us: int | None) -> int:
    if step.gap_us is not None:
        return step.gap_us
    # A trace that knows gaps has none here because no request ran; one that does not know them leaves the time between.
    known = step.mode is not None
    return 0 if known or before_us is None else max(0, step.start_us - before_us)


def _target_us(step: Step) -> float | None:
    if step.measured_target_time is not None:
        return step.measured_target_time / _US
    return None if step.mode is None else step.end_us - step.start_us


def _draft_times_us(runs: Sequence[Run]) -> list[float]:
    """Durations of the drafter's answers; where a run has none, what its passes tell of the drafts they verified."""
    times: list[float] = []
    for run in runs:
        if run.drafted:
            times += [answer.end_us - answer.start_us for answer in run.drafted]
        else:
            times += [step.measured_draft_time / _US for step in run.steps if step.measured_draft_time and not step.is_prompt_run]
    return times


def _knows_hidden(drafting: Sequence[Drafted | Ahead]) -> bool:
    return all(record.hidden_us is not None for record in drafting)


def _by_size(times: Iterable[tuple[int | None, float]]) -> tuple[BySize, ...]:
    found: defaultdict[int, list[float]] = defaultdict(list)
    for size, time_us in times:
        if size:
            found[size].append(time_us)
    return tuple(BySize(size, median(found[size]) * _MS, len(found[size])) for size in sorted(found))


def _spread(times_us: Iterable[float]) -> Spread | None:
    ordered = sorted(times_us)
    if not ordered:
        return None
    return Spread(fmean(ordered) * _MS, *(percentile(ordered, share) * _MS for share in (50, 90, 99)))


def percentile(ordered: Sequence[float], share: int) -> float:
    """The smallest of the ordered values that `share` percent of them do not exceed."""
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _sum(items: Iterable[_T], of: Callable[[_T], int | None]) -> int | None:
    known = [value for item in items if (value := of(item)) is not None]
    return sum(known) if known else None


def _missing(figures: Figures, runs: Sequence[Run], steps: Sequence[Step]) -> tuple[str, ...]:
    """One line for each figure that the trace does not tell though a run of its kind has it."""
    if not runs:
        return ("everything: it holds no run",)
    speculates = any(step.verify_len for step in steps) or any(run.drafted for run in runs)
    checks: list[tuple[bool, object, str]] = [
        (True, figures.requests, "request latency, TTFT, wait and throughput: no finished request is in it"),
        (bool(figures.requests), figures.ttft, "TTFT: its requests do not say when their first token came"),
        (bool(figures.requests), figures.wait, "wait before the first pass: its requests do not say when they were scheduled"),
        (True, steps or None, "everything about passes: it holds no step"),
        (bool(steps), figures.verify, "verification time: its steps have no measured_target_time"),
        (bool(steps), figures.gap, "time the target is idle between passes: its steps have no gap_us"),
        (speculates, figures.draft, "drafting time: it holds neither answers of the drafter nor measured_draft_time"),
        (speculates, figures.acceptance_by_position or None, "acceptance by position: its steps do not list their drafts"),
        (speculates, figures.hidden_share, "hidden drafting and overlap lanes of the drafter: it does not say when the drafter worked"),
    ]
    return tuple(message for applies, value, message in checks if applies and value is None)
