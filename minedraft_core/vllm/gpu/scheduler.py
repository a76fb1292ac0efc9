"""The engine loop's side of the GPU pipeline: vLLM's asynchronous scheduler with a cadence. Drafts never come through here.

Up to two passes are in flight, so a pass is scheduled before the one before it has delivered. Records of a pass are completed when its
output arrives, with the times that rank 0 measured on the devices.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from minedraft_core.config import MineDraftConfig, PipelineConfig
from minedraft_core.control import WITHOUT_LOOKAHEAD, ControlServer, ModeOrder, NoOrders, Orders, check_order
from minedraft_core.feed import Feed, FeedWriter, NoFeed
from minedraft_core.lookahead import Prospect, steps_ahead
from minedraft_core.overlap import hidden_us
from minedraft_core.parent import end_with_parent
from minedraft_core.sides import cadence_of
from minedraft_core.types import DrafterRecord, DraftRecord, LookaheadRecord, Mode, ModeRecord, Record, Side, Span, StepRecord, now_us
from minedraft_core.vllm.gpu.layout import longest_context
from minedraft_core.vllm.gpu.output import PacedOutput, TimedOutput
from minedraft_core.vllm.gpu.tetris import room_of
from minedraft_core.vllm.gpu.timing import PassTimes
from minedraft_core.vllm.scheduler import CadenceMixin, choice_of, own_limit

_RECENT_PASSES = 16
_US = 1e-6


def _mode_of(config: MineDraftConfig) -> Mode:
    if not config.is_parallel:
        return Mode.SEQUENTIAL
    return Mode.PEARL if config.force_pearl else Mode.PARALLEL


@dataclass
class _Pass:
    """What is known of a pass when it is scheduled."""

    side: Side | None
    is_prompt_run: bool
    new_ids: frozenset[str]
    preempted: int
    follows: bool
    overhead_us: int


class MineDraftAsyncScheduler(CadenceMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with a cadence. Configured by `additional_config["minedraft"]` and vLLM's speculative configuration."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        super().__init__(*args, **kwargs)
        config = PipelineConfig.model_validate(self.vllm_config.additional_config.get("minedraft", {}))
        config.speculative.check_on_gpus()
        self._choice = choice_of(config.speculative, self.scheduler_config.max_num_seqs)
        self._room = room_of(config.speculative, self.scheduler_config.max_num_seqs)
        extra = config.speculative.tetris_extra_proposals if self._room is not None else 0
        most_drafts: int = max(0, self.num_spec_tokens - extra)
        self.num_drafts: int = most_drafts
        self.mode = Mode.OFF
        if self.num_drafts:
            self.mode = _mode_of(config.speculative)
        self._looks_ahead = self.mode is Mode.PEARL
        self._prospect = Prospect()
        self._fixed_steps_ahead = config.drafter.steps_ahead
        if self._looks_ahead:
            # Drafts made ahead need blocks, too: the token after a draft, and the next draft.
            self.num_lookahead_tokens += self.num_spec_tokens + 1
        self.cadence = cadence_of(self.mode)
        self._longest_draft = 0
        if (speculative := self.vllm_config.speculative_config) is not None and speculative.draft_model_config is not None:
            self._longest_draft = longest_context(speculative.method, speculative.draft_model_config.max_model_len, self.max_model_len)
        self._drafter_up = self.num_drafts > 0
        self._unknown: set[str] = set()
        self._orders: Orders = NoOrders()
        if config.control_address is not None:
            modes = tuple(Mode) if self._looks_ahead else WITHOUT_LOOKAHEAD
            self._orders = ControlServer(config.control_address, lambda order: check_order(order, most_drafts, modes))
        self._is_prompt_run = False
        self._preempted = 0
        self._follows = False
        self._in_flight: deque[_Pass] = deque()
        self._spans: deque[Span] = deque(maxlen=_RECENT_PASSES)
        self._verify_us: deque[int] = deque(maxlen=_RECENT_PASSES)
        self._draft_us: deque[int] = deque(maxlen=_RECENT_PASSES)
        self._steps = 0
        self._feed: Feed = FeedWriter(config.feed_address) if config.feed_address else NoFeed()
        self._records: list[Record] = [ModeRecord(self.mode, self.num_drafts)]
        if self._drafter_up:
            self._records.append(DrafterRecord(up=True, restarted=False, reason="start"))
        self._flush()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule the side whose turn it is, and prompts."""
        began_us = now_us()
        if (order := self._orders.take()) is not None:
            self._obey(order)
        self.begin_turn()
        output = super().schedule(throttle_prefills)
        if output.total_num_scheduled_tokens:
            self._in_flight.append(
                _Pass(
                    side=self.due,
                    is_prompt_run=self._is_prompt_run,
                    new_ids=frozenset(request.req_id for request in output.scheduled_new_reqs),
                    preempted=self._preempted,
                    follows=self._follows,
                    overhead_us=now_us() - began_us,
                )
            )
            self._preempted = 0
            self._follows = True
        return PacedOutput(**vars(output), steps_ahead=self._steps_ahead()) if self._looks_ahead else output

    def _steps_ahead(self) -> int:
        """How far the drafter goes ahead after the draft that this pass orders, from the times of late."""
        if self.mode is not Mode.PEARL:
            return 0
        most = self.num_drafts + 1
        if self._fixed_steps_ahead is not None:
            return min(most, self._fixed_steps_ahead)
        if not self._verify_us or not self._draft_us or not self._prospect.worth():
            return 0
        step_us = median(self._draft_us) / self.num_spec_tokens
        return min(most, steps_ahead(median(self._verify_us), step_us, self.num_spec_tokens))

    def _obey(self, order: ModeOrder) -> None:
        """Change mode and number of drafts. What is drafted and under way is verified as it was scheduled."""
        self.mode, self.num_drafts = order.mode, order.num_speculative_tokens
        self.switch(self.mode if self._drafter_up else Mode.OFF)
        self._records.append(ModeRecord(self.mode, self.num_drafts))

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        self._is_prompt_run = any(request_id not in self.cadence for request_id in scheduled)
        # The worker drafts for this pass, and vLLM plans the next one, with so many.
        width = self._choice.width(self.num_drafts, len(scheduled)) if self.num_drafts else 0
        scheduler_output.num_spec_tokens_to_schedule = width
        super()._update_after_schedule(scheduler_output)
        if not self.num_spec_tokens:
            return
        for request_id in scheduled:
            request = self.requests[request_id]
            if not self.num_drafts and not request.is_prefill_chunk:
                self._unknown.add(request_id)
            if request.spec_token_ids:
                request.spec_token_ids = request.spec_token_ids[: own_limit(request)] if self._can_draft(request, width) else []

    def _can_draft(self, request: Request, width: int) -> bool:
        """Whether drafts will be at hand when the request is next verified.

        The drafter does not know what a request got while nothing was drafted.
        vLLM checks drafts against a grammar before ours have landed, so a request with one goes without; so does a context that outgrows
        the drafter's.
        """
        return (
            self._drafter_up
            and request.request_id not in self._unknown
            and not request.use_structured_output
            and request.num_computed_tokens + width <= self._longest_draft
        )

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Take in what the target delivered, and record the pass."""
        if not scheduler_output.total_num_scheduled_tokens:
            return super().update_from_output(scheduler_output, model_runner_output)
        arrived_us = now_us()
        known = self._in_flight.popleft()
        drafts = self._verdicts(known, scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        times = model_runner_output.times if isinstance(model_runner_output, TimedOutput) else None
        if isinstance(model_runner_output, TimedOutput) and model_runner_output.failure is not None:
            self._drafter_up = False
            # Without drafts two sides are half batches that gain nothing.
            self.switch(Mode.OFF)
            self._records.append(model_runner_output.failure)
        self._record(known, scheduler_output, outputs, drafts, times, arrived_us)
        if not self.running:
            self._follows = False
        self._flush()
        return outputs

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self._preempted += 1
        if not self.cache_config.enable_prefix_caching:
            # Its whole context will run again, and the drafter reads it.
            self._unknown.discard(request.request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        self._unknown.discard(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    @staticmethod
    def _verdicts(known: _Pass, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> list[tuple[int, int]]:
        """(drafted, accepted) for each request with drafts. vLLM pads new requests with placeholders, which are no drafts."""
        index, sampled = output.req_id_to_index, output.sampled_token_ids
        return [
            (len(tokens), max(0, len(sampled[index[request_id]]) - 1))
            for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items()
            if request_id not in known.new_ids
        ]

    def _record(
        self,
        known: _Pass,
        scheduler_output: SchedulerOutput,
        outputs: dict[int, EngineCoreOutputs],
        drafts: list[tuple[int, int]],
        times: PassTimes | None,
        arrived_us: int,
    ) -> None:
        span = (
            Span(times.start_us, times.end_us)
            if times is not None
            else Span(self._spans[-1].end_us if self._spans else arrived_us, arrived_us)
        )
        self._spans.append(span)
        self._steps += 1
        jobs = () if times is None else times.drafts
        for job in jobs:
            drafted = Span(job.start_us, job.end_us)
            self._records.append(
                DraftRecord(
                    round=job.number,
                    start_us=job.start_us,
                    end_us=job.end_us,
                    hidden_us=hidden_us(drafted, self._spans),
                    batched_requests=job.num_reqs,
                    drafted_per_position=[job.num_reqs] * job.num_drafts,
                )
            )
        for ahead in () if times is None else times.ahead:
            self._prospect.learn(ahead.hits, ahead.misses)
            hidden = hidden_us(ahead.span, self._spans)
            self._records.append(LookaheadRecord(ahead.span.start_us, ahead.span.end_us, hidden, ahead.hits, ahead.misses, ahead.discarded))
        if times is not None and not known.is_prompt_run:
            self._verify_us.append(span.duration_us)
            self._draft_us.extend(job.end_us - job.start_us for job in jobs)
        counts = self.cadence.counts
        counted = [pair for pair in drafts if pair[0]]
        lengths = [drafted for drafted, _ in counted]
        proposed = sum(lengths)
        verified = proposed if self._room is None else self._room.kept(lengths)
        self._records.append(
            StepRecord(
                step=self._steps,
                start_us=span.start_us,
                end_us=span.end_us,
                mode=self.mode,
                side=-1 if known.side is None else int(known.side),
                is_prompt_run=known.is_prompt_run,
                is_parallelised=min(counts) > 0,
                batched_requests=len(scheduler_output.num_scheduled_tokens),
                preempted_requests=known.preempted,
                batched_token_num=scheduler_output.total_num_scheduled_tokens,
                proposed_len=proposed,
                verify_len=verified,
                accepted_num=sum(accepted for _, accepted in counted),
                generated_num=sum(len(output.new_token_ids) for group in outputs.values() for output in group.outputs),
                measured_draft_time=sum(job.end_us - job.start_us for job in jobs) * _US,
                measured_target_time=span.duration_us * _US,
                measured_overhead_time=(known.overhead_us + now_us() - arrived_us) * _US,
                gap_us=times.gap_us if times is not None and known.follows else None,
                num_speculative_tokens=self.num_drafts,
                side_requests=counts,
                drafter_wait_us=times.wait_us if times is not None and counted else None,
                drafts=counted,
                dropped={"tetris": proposed - verified} if proposed > verified else {},
                fallback_reason=None if self._drafter_up or not self.num_drafts else "down",
            )
        )

    def _flush(self) -> None:
        if self._records:
            self._feed.push(tuple(self._records))
            self._records.clear()

    def shutdown(self) -> None:
        """End the feed and the control with the engine."""
        self._orders.close()
        self._flush()
        self._feed.close()
        super().shutdown()
