"""The cadence over vLLM's schedulers: one mixin for both devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from minedraft_core.choice import ByBatch, Choice, Everything
from minedraft_core.config import MineDraftConfig
from minedraft_core.sides import Cadence, cadence_of
from minedraft_core.tetris import Tetris
from minedraft_core.types import DRAFT_LIMIT, Mode, Side

if TYPE_CHECKING:

    class _Base(Scheduler):
        """What the mixin is mixed into."""

else:
    _Base = object

_NEVER = 1 << 62
_NO_LIMIT = 1 << 30


def own_limit(request: Request) -> int:
    """How many drafts a step the client allows."""
    params = request.sampling_params
    limit: int = (params.extra_args or {}).get(DRAFT_LIMIT, _NO_LIMIT) if params is not None else _NO_LIMIT
    return limit


def tetris_of(config: MineDraftConfig, max_requests: int) -> Tetris | None:
    """TETRIS as it is configured, or None."""
    if not config.tetris:
        return None
    return Tetris(config.tetris_extra_proposals, config.tetris_turn_on_batch_size, config.tetris_capacity, max_requests)


def choice_of(config: MineDraftConfig, max_requests: int) -> Choice:
    """How many tokens are drafted and which of them are verified."""
    if (rows := config.num_speculative_tokens_per_batch_size) is not None:
        return ByBatch.of(rows)
    return tetris_of(config, max_requests) or Everything()


class CadenceMixin(_Base):
    """Schedules only the side whose turn it is, by vLLM's own `next_decode_eligible_step`. Requests still in prefill are always eligible.

    Set `cadence` before the first step.
    """

    cadence: Cadence
    due: Side | None = None

    def begin_turn(self) -> None:
        """Decide whose turn it is and make everybody else wait. Call once before vLLM schedules a step."""
        self.due = self.cadence.advance()
        visited = set(self.cadence.members(self.due))
        for request in self.running:
            request_id = request.request_id
            request.next_decode_eligible_step = 0 if request_id in visited or request_id not in self.cadence else _NEVER

    def switch(self, mode: Mode) -> None:
        """Go on in another mode with the requests that take part. Call between two steps."""
        members = [request_id for side in Side for request_id in self.cadence.members(side)]
        self.cadence = cadence_of(mode)
        for request_id in members:
            self.cadence.admit(request_id)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            if not self.requests[request_id].is_prefill_chunk and request_id not in self.cadence:
                self.cadence.admit(request_id)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        request.next_decode_eligible_step = 0
        self.cadence.leave(request.request_id)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> tuple[dict[str, object] | None, dict[str, object] | None]:
        self.cadence.leave(request.request_id)
        return super()._free_request(request, delay_free_blocks)
