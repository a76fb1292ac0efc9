"""The engine loop's side of the CPU pipeline: drafts in before a step is scheduled, outcomes out after it has run.

vLLM's loop is schedule, execute, update. While it executes, in the worker's process, the draft process works on the orders that
the last update placed. So with two sides the drafts of the side due next are made during the pass over the other.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from minedraft_core.config import PipelineConfig
from minedraft_core.control import ControlServer, NoOrders, Orders, check_order
from minedraft_core.feed import Feed, FeedWriter, NoFeed
from minedraft_core.ledger import Context
from minedraft_core.overlap import hidden_us
from minedraft_core.parent import end_with_parent
from minedraft_core.sides import cadence_of
from minedraft_core.supervisor import Drafting, Gathered, NoDrafting
from minedraft_core.types import DraftRecord, LookaheadRecord, Mode, ModeRecord, Record, Side, Span, StepRecord, now_us
from minedraft_core.vllm.cpu.launch import supervised_drafting
from minedraft_core.vllm.cpu.noise import sampling_of, seeded
from minedraft_core.vllm.scheduler import CadenceMixin, choice_of, own_limit

_RECENT_PASSES = 16
# One at a time uses all cores already.
_COMPILERS = 2
_LEAST_PRIORITY = 19
_US = 1e-6


@dataclass
class _Step:
    """What is known of a step between its schedule and its update."""

    began_us: int = 0
    started_us: int = 0
    gathered: Gathered = field(default_factory=Gathered)
    expected_drafts: bool = False
    proposed: int = 0
    preempted: int = 0
    overhead_us: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, count: int) -> None:
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


class MineDraftScheduler(CadenceMixin, Scheduler):
    """vLLM's synchronous scheduler with a cadence and a supervised drafter. Configured by `additional_config["minedraft"]`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        super().__init__(*args, **kwargs)
        config = PipelineConfig.model_validate(self.vllm_config.additional_config["minedraft"])
        self.mode = config.speculative.mode
        self.num_drafts = config.speculative.num_speculative_tokens if self.mode is not Mode.OFF else 0
        self.cadence = cadence_of(self.mode)
        self._choice = choice_of(config.speculative, self.scheduler_config.max_num_seqs)
        self._draft_temperature = config.speculative.draft_temperature
        self._records: list[Record] = [ModeRecord(self.mode, self.num_drafts)]
        self._step = _Step()
        self._steps = 0
        self._passes: deque[Span] = deque(maxlen=_RECENT_PASSES)
        self._idle_since_us: int | None = None
        self._feed: Feed = FeedWriter(config.feed_address) if config.feed_address else NoFeed()
        self._drafting: Drafting = NoDrafting()
        if self.mode is not Mode.OFF:
            self._drafting = supervised_drafting(config, self.vllm_config, self.kv_cache_config, self._report)
        self._orders: Orders = NoOrders()
        if config.control_address is not None:
            most = self.num_drafts
            self._orders = ControlServer(config.control_address, lambda order: check_order(order, most, tuple(Mode)))
        # Grammars are compiled by threads of this process, on the cores of the target: they get what it leaves.
        manager = self.structured_output_manager
        manager.executor = ThreadPoolExecutor(_COMPILERS, "compiler", initializer=os.nice, initargs=(_LEAST_PRIORITY,))
        self._flush()

    def add_request(self, request: Request) -> None:
        """Take a request in. One that samples without a seed gets a seed of its own, so that the drafter can draw as the target will."""
        if self.vllm_config.speculative_config is not None:
            request.sampling_params = seeded(request.sampling_params)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Collect the drafts that are due, then schedule the side whose turn it is."""
        step = self._step
        step.began_us = now_us()
        if (order := self._orders.take()) is not None:
            self.mode, self.num_drafts = order.mode, order.num_speculative_tokens
            self.switch(self.mode)
            self._records.append(ModeRecord(self.mode, self.num_drafts))
        self.begin_turn()
        due = self.cadence.members(self.due)
        if due:
            step.gathered = self._drafting.gather(due)
            step.expected_drafts = self.num_drafts > 0
            self._land(step.gathered)
        output = super().schedule(throttle_prefills)
        step.started_us = now_us()
        step.overhead_us = step.started_us - step.began_us - round(step.gathered.waited / _US)
        return output

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """The worker proposes nothing; drafts come from the draft process."""

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Take in what the target delivered and order the next drafts."""
        end_us = now_us()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._order(scheduler_output)
            self._record(scheduler_output, model_runner_output, outputs, end_us)
        self._flush()
        return outputs

    def _land(self, gathered: Gathered) -> None:
        """Choose what is verified of the drafts and hand it to vLLM, which checks it against grammars."""
        step = self._step
        step.proposed = sum(len(draft.tokens) for draft in gathered.drafts.values())
        kept = self._choice.keep(gathered.drafts, self.num_drafts, self.cadence.sides)
        step.drop("tetris", step.proposed - sum(map(len, kept.values())))
        super().update_draft_token_ids(DraftTokenIds(list(kept), list(kept.values())))
        for request_id, drafts in kept.items():
            request = self.requests.get(request_id)
            step.drop("grammar", len(drafts) - (len(request.spec_token_ids) if request is not None else 0))
        step.drop("late", gathered.late)
        step.drop("fault", gathered.lost)
        for answer in gathered.answers:
            lengths = [len(row) for row in answer.tokens]
            per_position = [sum(length > position for length in lengths) for position in range(max(lengths, default=0))]
            hidden = hidden_us(answer.span, self._passes)
            self._records.append(DraftRecord(answer.round, answer.span.start_us, answer.span.end_us, hidden, len(lengths), per_position))
            if (ahead := answer.lookahead) is not None:
                hidden = hidden_us(ahead.span, self._passes)
                self._records.append(
                    LookaheadRecord(ahead.span.start_us, ahead.span.end_us, hidden, ahead.hits, ahead.misses, ahead.discarded)
                )

    def _order(self, scheduler_output: SchedulerOutput) -> None:
        """Order drafts for every request that this step brought forward, those of the side due next first."""
        limits = {
            request_id: limit
            for request_id in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(request_id)) is not None and (limit := self._draft_limit(request)) > 0
        }
        for side in (Side.A, Side.B) if self.due is Side.B else (Side.B, Side.A):
            # The batch is the side, whose pass verifies also those that are not drafted for now.
            batch = self.cadence.members(side)
            width = self._choice.width(self.num_drafts, len(batch))
            self._drafting.order(
                {request_id: self._context(request_id, limits[request_id]) for request_id in batch if request_id in limits},
                width,
                self.cadence.ahead(width),
            )

    def _context(self, request_id: str, limit: int) -> Context:
        request = self.requests[request_id]
        return Context(request.all_token_ids, limit, sampling_of(request, self._draft_temperature))

    def _draft_limit(self, request: Request) -> int:
        """How many drafts are of use: the target adds one token of its own to them."""
        if not self.num_drafts or request.status != RequestStatus.RUNNING or request.is_prefill_chunk:
            return 0
        left = min(request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens)
        return min(left - 1, own_limit(request))

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self._abandon(request)
        self._step.preempted += 1
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        self._abandon(request)
        return super()._free_request(request, delay_free_blocks)

    def _abandon(self, request: Request) -> None:
        self._step.drop("late", len(request.spec_token_ids))
        self._drafting.forget(request.request_id)

    def _record(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
        end_us: int,
    ) -> None:
        step, self._step = self._step, _Step()
        self._passes.append(Span(step.started_us, end_us))
        self._steps += 1
        index, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        drafts = [
            (len(tokens), len(sampled[index[request_id]]) - 1)
            for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items()
        ]
        verified = sum(drafted for drafted, _ in drafts)
        counts = self.cadence.counts
        gathered = step.gathered
        self._records.append(
            StepRecord(
                step=self._steps,
                start_us=step.started_us,
                end_us=end_us,
                mode=self.mode,
                side=-1 if self.due is None else int(self.due),
                is_prompt_run=bool(scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids),
                is_parallelised=min(counts) > 0,
                batched_requests=len(scheduler_output.num_scheduled_tokens),
                preempted_requests=step.preempted,
                batched_token_num=scheduler_output.total_num_scheduled_tokens,
                proposed_len=step.proposed,
                verify_len=verified,
                accepted_num=sum(accepted for _, accepted in drafts),
                generated_num=sum(len(output.new_token_ids) for group in outputs.values() for output in group.outputs),
                measured_draft_time=sum(answer.span.duration_us for answer in gathered.answers) * _US,
                measured_target_time=(end_us - step.started_us) * _US,
                measured_overhead_time=(step.overhead_us + now_us() - end_us) * _US,
                gap_us=None if self._idle_since_us is None else step.started_us - self._idle_since_us,
                num_speculative_tokens=self.num_drafts,
                side_requests=counts,
                drafter_wait_us=round(gathered.waited / _US) if step.expected_drafts else None,
                drafts=drafts,
                dropped=step.dropped,
                fallback_reason=gathered.reason,
            )
        )
        self._idle_since_us = end_us if self.running else None

    def _report(self, record: Record) -> None:
        """Send what another thread has to say: it cannot wait for the next step."""
        self._feed.push((record,))

    def _flush(self) -> None:
        if self._records:
            self._feed.push(tuple(self._records))
            self._records.clear()

    def shutdown(self) -> None:
        """End the drafter, the feed and the control with the engine."""
        self._orders.close()
        self._drafting.close()
        self._flush()
        self._feed.close()
        super().shutdown()
