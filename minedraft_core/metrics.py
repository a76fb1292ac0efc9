"""Prometheus metrics of the pipeline, fed by the feed. All are present at zero in every mode."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from minedraft_core.acceptance import accepted_per_position
from minedraft_core.feed import FeedMessage
from minedraft_core.types import DrafterRecord, DraftRecord, LookaheadRecord, Mode, ModeRecord, Record, RequestRecord, Side, StepRecord

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_GAP_BUCKETS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_US = 1e-6
_WINDOW = 60.0
DROP_REASONS = ("tetris", "late", "fault", "grammar")
FALLBACK_REASONS = ("late", "down")
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


@dataclass(frozen=True)
class ServiceLevels:
    """Limits in seconds that a request has to keep; None sets no limit. TPOT is the mean time between a request's tokens."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def verdicts(self, request: RequestRecord) -> dict[str, bool]:
        """Whether the request kept each limit, and "all" of them. A request without a token misses every limit."""
        ttft = (request.first_token_us - request.start_us) * _US
        e2e = (request.end_us - request.start_us) * _US
        tpot = (request.end_us - request.first_token_us) * _US / max(1, request.gen_len - 1)
        answered = request.gen_len > 0
        met = {
            name: answered and (limit is None or value <= limit)
            for name, value, limit in (("ttft", ttft, self.ttft), ("tpot", tpot, self.tpot), ("e2e", e2e, self.e2e))
        }
        return {**met, "all": all(met.values())}


class TokenLatency(Collector):
    """Histogram of the time between tokens, each token counted: a step that delivers three tokens counts three times.

    A request tells its mean, so all of its tokens fall into one bucket.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(_TOKEN_BUCKETS) + 1)
        self._seconds = 0.0

    def observe(self, request: RequestRecord) -> None:
        """Take in the tokens after the first one."""
        tokens = request.gen_len - 1
        if tokens < 1:
            return
        seconds = (request.end_us - request.first_token_us) * _US
        self._counts[bisect_left(_TOKEN_BUCKETS, seconds / tokens)] += tokens
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """The histogram as it stands."""
        counts = list(accumulate(self._counts))
        limits = [*map(str, _TOKEN_BUCKETS), "+Inf"]
        family = HistogramMetricFamily(
            "minedraft_inter_token_latency_seconds", "Time between the tokens of finished requests, each token counted."
        )
        family.add_metric([], list(zip(limits, counts, strict=True)), self._seconds)
        yield family


class RecentRatio:
    """A part over a whole, both summed over the last minute; 0 where the whole is."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, int, int]] = deque()

    def observe(self, part: int, whole: int) -> None:
        """Add to both."""
        now = self._clock()
        self._recent.append((now, part, whole))
        while self._recent[0][0] < now - _WINDOW:
            self._recent.popleft()

    def __call__(self) -> float:
        """The ratio now."""
        horizon = self._clock() - _WINDOW
        recent = [(part, whole) for at, part, whole in list(self._recent) if at >= horizon]
        whole = sum(whole for _, whole in recent)
        return sum(part for part, _ in recent) / whole if whole else 0.0


class PipelineMetrics:
    """A feed sink that keeps the metrics of one engine in a registry of its own."""

    def __init__(self, levels: ServiceLevels, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_tokens` is the largest number of draft tokens; positions up to it are present from the start."""
        self.registry = CollectorRegistry()
        self._token_latency = TokenLatency()
        self.registry.register(self._token_latency)
        self._levels = levels
        self._hidden_share, self._success = RecentRatio(clock), RecentRatio(clock)
        self._declare(max_tokens)

    def _declare(self, max_tokens: int) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"minedraft_{name}", text, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"minedraft_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"minedraft_{name}", text, labels, registry=self.registry)

        self._draft_step = histogram("draft_step_duration_seconds", "Time the drafter took for one order.", _STEP_BUCKETS)
        self._verify_step = histogram("verify_step_duration_seconds", "Time of one pass of the target.", _STEP_BUCKETS)
        self._gap = histogram("verify_gap_seconds", "Time the target was idle between two passes while requests ran.", _GAP_BUCKETS)
        self._wait = histogram("drafter_wait_seconds", "Time a step waited for the drafter.", _GAP_BUCKETS)
        lengths = tuple(float(length) for length in range(max_tokens + 1))
        self._per_draft = histogram("accepted_tokens_per_draft", "Draft tokens accepted of one verified draft.", lengths)
        self._busy = counter("draft_busy_seconds_total", "Time the drafter worked.")
        self._hidden = counter("draft_hidden_seconds_total", "Drafting time that passes of the target hid.")
        self._exposed = counter("draft_exposed_seconds_total", "Drafting time during which the target was idle.")
        self._draft_tokens = counter("draft_tokens_total", "Tokens drafted.")
        self._verified_tokens = counter("verified_tokens_total", "Draft tokens verified by the target.")
        self._accepted_tokens = counter("accepted_tokens_total", "Draft tokens accepted by the target.")
        self._draft_at = counter("draft_tokens_per_position_total", "Draft tokens verified, by position.", "position")
        self._accepted_at = counter("accepted_tokens_per_position_total", "Draft tokens accepted, by position.", "position")
        self._dropped = counter("draft_tokens_dropped_total", "Draft tokens that were not verified, by reason.", "reason")
        self._lookahead = counter("lookahead_total", "Drafts made ahead that could be used or not.", "result")
        self._discarded = counter(
            "lookahead_discarded_tokens_total", "Tokens drafted ahead that could not be used; not in the tokens drafted."
        )
        self._restarts = counter("drafter_restarts_total", "Times the drafter was started anew after a fault.")
        self._fallbacks = counter("drafter_fallback_steps_total", "Steps the target went on without due drafts, by reason.", "reason")
        self._finished = counter("requests_finished_total", "Requests finished, by reason; each choice counts.", "reason")
        self._generated = counter("generation_tokens_total", "Tokens delivered.")
        self._slo = counter("slo_requests_total", "Finished requests by service level and result.", "slo", "result")
        self._good_requests = counter("goodput_requests_total", "Finished requests that kept every service level.")
        self._good_tokens = counter("goodput_tokens_total", "Tokens of requests that kept every service level.")
        self._feed_dropped = counter("feed_dropped_total", "Records lost because the feed was full.")
        self._mode = gauge("mode", "1 for the mode in force.", "mode")
        self._num_tokens = gauge("num_speculative_tokens", "Draft tokens asked for in a step.")
        self._side = gauge("sub_batch_requests", "Running requests of each side.", "side")
        self._up = gauge("drafter_up", "1 while the drafter is loaded and answers.")
        self._overlap = gauge("overlap_ratio", "Hidden over busy drafting time in the last minute.")
        self._overlap.set_function(self._hidden_share)
        self._success_ratio = gauge("verification_success_ratio", "Accepted over verified draft tokens in the last minute.")
        self._success_ratio.set_function(self._success)
        for position in range(max_tokens):
            self._draft_at.labels(position)
            self._accepted_at.labels(position)
        for family, values in (
            (self._dropped, DROP_REASONS),
            (self._lookahead, ("hit", "miss")),
            (self._fallbacks, FALLBACK_REASONS),
            (self._finished, FINISH_REASONS),
            (self._mode, Mode),
            (self._side, [side.name for side in Side]),
        ):
            for value in values:
                family.labels(value)
        for level in ("ttft", "tpot", "e2e", "all"):
            for result in ("met", "missed"):
                self._slo.labels(level, result)

    def __call__(self, message: FeedMessage) -> None:
        """Take in the records of one message."""
        self._feed_dropped.inc(message.dropped)
        for record in message.records:
            self.observe(record)

    def observe(self, record: Record) -> None:
        """Take in one record."""
        match record:
            case StepRecord():
                self._observe_step(record)
            case DraftRecord():
                self._observe_draft(record)
            case LookaheadRecord():
                self._observe_lookahead(record)
            case RequestRecord():
                self._observe_request(record)
            case DrafterRecord():
                self._up.set(record.up)
                if record.restarted:
                    self._restarts.inc()
            case ModeRecord():
                for mode in Mode:
                    self._mode.labels(mode).set(mode == record.mode)
                self._num_tokens.set(record.num_speculative_tokens)

    def _observe_step(self, step: StepRecord) -> None:
        self._verify_step.observe(step.measured_target_time)
        if step.gap_us is not None:
            self._gap.observe(step.gap_us * _US)
        if step.drafter_wait_us is not None:
            self._wait.observe(step.drafter_wait_us * _US)
        for side in Side:
            self._side.labels(side.name).set(step.side_requests[side])
        self._verified_tokens.inc(step.verify_len)
        self._accepted_tokens.inc(step.accepted_num)
        self._generated.inc(step.generated_num)
        self._success.observe(step.accepted_num, step.verify_len)
        for drafted, accepted in step.drafts:
            if drafted:
                self._per_draft.observe(accepted)
        drafted_at, accepted_at = accepted_per_position(step.drafts)
        for position, (drafted, accepted) in enumerate(zip(drafted_at, accepted_at, strict=True)):
            self._draft_at.labels(position).inc(drafted)
            self._accepted_at.labels(position).inc(accepted)
        for reason, count in step.dropped.items():
            self._dropped.labels(reason).inc(count)
        if step.fallback_reason is not None:
            self._fallbacks.labels(step.fallback_reason).inc()

    def _observe_draft(self, draft: DraftRecord) -> None:
        busy = self._observe_busy(draft.start_us, draft.end_us, draft.hidden_us)
        self._draft_step.observe(busy * _US)
        self._draft_tokens.inc(sum(draft.drafted_per_position))

    def _observe_lookahead(self, ahead: LookaheadRecord) -> None:
        self._lookahead.labels("hit").inc(ahead.hits)
        self._lookahead.labels("miss").inc(ahead.misses)
        self._discarded.inc(ahead.discarded)
        self._observe_busy(ahead.start_us, ahead.end_us, ahead.hidden_us)

    def _observe_busy(self, start_us: int, end_us: int, hidden_us: int) -> int:
        busy = max(0, end_us - start_us)
        self._busy.inc(busy * _US)
        self._hidden.inc(hidden_us * _US)
        self._exposed.inc(max(0, busy - hidden_us) * _US)
        self._hidden_share.observe(hidden_us, busy)
        return busy

    def _observe_request(self, request: RequestRecord) -> None:
        self._finished.labels(request.finish_reason).inc()
        if request.finish_reason in ("abort", "error"):
            return
        self._token_latency.observe(request)
        verdicts = self._levels.verdicts(request)
        for level, met in verdicts.items():
            self._slo.labels(level, "met" if met else "missed").inc()
        if verdicts["all"]:
            self._good_requests.inc()
            self._good_tokens.inc(request.gen_len)
