"""From samples to the figures of a load test. Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from loadtest.plan import Demands, Limits
from loadtest.sample import Outcome, Sample, seconds_of

DEFINITIONS = {
    "counted": "Requests that began after the warm-up. Those that failed, that the client aborted, and that the end of the test cut short "
    "are counted apart; times, tokens and throughput are of the requests that were done.",
    "duration_s": "From the beginning of the first counted request to the end of the last that was done.",
    "ttft_ms": "From the moment before the request is sent, its connection included, to the first event that brings a token, "
    "whose text may be empty.",
    "tpot_ms": "Per request: time from the first token to the last, over the output tokens but the first.",
    "itl_ms": "Time between two events that bring tokens, over all such pairs of all requests; an event can hold several tokens.",
    "e2e_ms": "From the moment before the request is sent to the end of the stream.",
    "request_tokens_per_second": "Per request: output tokens over e2e.",
    "tokens": "As the server counts them in usage.",
    "percentiles": "Interpolated between the two nearest values; of itl_ms within 0.5 %.",
    "slo": "Share of the requests, failed ones included and aborted or cut ones not, that keep each limit, and all of them.",
    "goodput": "Requests a second that keep every limit, and the output tokens a second of these requests, over duration_s. "
    "Per GPU: over the number of GPUs that --gpus says the server uses.",
}


class Spread(msgspec.Struct, frozen=True):
    """How values are spread. `quantiles` are the 0th to the 100th percentile."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float
    quantiles: tuple[float, ...]


class Goodput(msgspec.Struct, frozen=True):
    """What was done within every limit, a second; per GPU None where no GPU is at work."""

    requests_per_second: float
    tokens_per_second: float
    requests_per_second_per_gpu: float | None
    tokens_per_second_per_gpu: float | None


class Figures(msgspec.Struct, frozen=True):
    """The figures of a test; DEFINITIONS says what they mean. None where there is nothing to measure."""

    done: int
    failed: int
    aborted: int
    cut: int
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    tokens_per_delivery: float | None
    requests_per_second: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    request_tokens_per_second: Spread | None
    slo: dict[str, float]
    goodput: Goodput
    errors: dict[str, int]


def summarise(samples: Sequence[Sample], limits: Limits, gpus: int = 0) -> Figures:
    """The figures of all counted requests."""
    outcomes = Counter(sample.outcome for sample in samples)
    done = [sample for sample in samples if sample.outcome is Outcome.DONE]
    judged = [sample for sample in samples if sample.outcome in (Outcome.DONE, Outcome.FAILED)]
    duration = max((sample.begin + sample.end for sample in done), default=0.0) - min((sample.begin for sample in samples), default=0.0)
    tokens = sum(sample.completion_tokens for sample in done)
    good = [sample for sample in done if sample.completion_tokens > 0 and all(sample.verdicts(limits).values())]
    per_second = _over(tokens, duration)
    good_requests, good_tokens = _over(len(good), duration), _over(sum(sample.completion_tokens for sample in good), duration)
    deliveries = sum(sample.deliveries for sample in done)
    return Figures(
        done=len(done),
        failed=outcomes[Outcome.FAILED],
        aborted=outcomes[Outcome.ABORTED],
        cut=outcomes[Outcome.CUT],
        duration_s=max(duration, 0.0),
        prompt_tokens=sum(sample.prompt_tokens for sample in done),
        completion_tokens=tokens,
        tokens_per_delivery=tokens / deliveries if deliveries else None,
        requests_per_second=_over(len(done), duration),
        tokens_per_second=per_second,
        tokens_per_second_per_gpu=per_second / gpus if gpus else None,
        ttft_ms=spread([sample.first * 1000 for sample in done if sample.first is not None]),
        tpot_ms=spread([sample.tpot * 1000 for sample in done if sample.tpot is not None]),
        itl_ms=_gaps(done),
        e2e_ms=spread([sample.end * 1000 for sample in done]),
        request_tokens_per_second=spread([sample.tokens_per_second for sample in done if sample.end > 0]),
        slo=_shares(judged, limits),
        goodput=Goodput(
            requests_per_second=good_requests,
            tokens_per_second=good_tokens,
            requests_per_second_per_gpu=good_requests / gpus if gpus else None,
            tokens_per_second_per_gpu=good_tokens / gpus if gpus else None,
        ),
        errors=dict(Counter(sample.error or "" for sample in samples if sample.outcome is Outcome.FAILED).most_common()),
    )


def faults(figures: Figures, demands: Demands) -> list[str]:
    """What the test did not keep, one sentence each; empty where it passed."""
    found = []
    judged = figures.done + figures.failed
    if not judged:
        if figures.aborted:
            return ["every client left early, so no request can be judged: lower --abort-share"]
        return ["no request ended after the warm-up: test longer"]
    failed = figures.failed / judged
    if failed > demands.error_share:
        found.append(f"{failed:.1%} of the requests failed, {demands.error_share:.1%} may")
    kept = figures.slo.get("all")
    if kept is not None and kept < demands.slo_share:
        found.append(f"{kept:.1%} of the requests kept every limit, {demands.slo_share:.1%} have to")
    return found


def spread(values: Sequence[float]) -> Spread | None:
    """How values are spread, each counted once; None without any."""
    return _weighted([(value, 1) for value in values], sum(values))


def _gaps(done: Sequence[Sample]) -> Spread | None:
    counts: Counter[int] = Counter()
    for sample in done:
        counts.update(sample.gaps)
    total = sum(sample.spoken for sample in done)
    return _weighted([(seconds_of(bucket) * 1000, count) for bucket, count in counts.items()], total * 1000)


def _weighted(pairs: Sequence[tuple[float, int]], total: float) -> Spread | None:
    """The spread of values that each came so many times; `total` is their sum."""
    ordered = sorted(pairs)
    ends = list(accumulate(times for _, times in ordered))
    if not ends:
        return None
    count = ends[-1]

    def at(percent: float) -> float:
        rank = percent / 100 * (count - 1)
        below, above = (ordered[bisect_right(ends, place)][0] for place in (int(rank), min(int(rank) + 1, count - 1)))
        return below + (above - below) * (rank - int(rank))

    return Spread(
        count=count,
        mean=total / count,
        p50=at(50),
        p90=at(90),
        p95=at(95),
        p99=at(99),
        largest=ordered[-1][0],
        quantiles=tuple(at(percent) for percent in range(101)),
    )


def _shares(judged: Sequence[Sample], limits: Limits) -> dict[str, float]:
    names = list(limits.named())
    if not judged or not names:
        return {}
    verdicts = [sample.verdicts(limits) for sample in judged]
    shares = {name: sum(verdict[name] for verdict in verdicts) / len(judged) for name in names}
    return {**shares, "all": sum(all(verdict.values()) for verdict in verdicts) / len(judged)}


def _over(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
