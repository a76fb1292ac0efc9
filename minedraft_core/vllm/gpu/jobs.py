"""Draft jobs between their start and their landing. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from minedraft_core.vllm.gpu.timing import JobTicket


@dataclass(frozen=True)
class DraftJob:
    """One batch that is drafted for.

    `slot` is its place in the ring, `idx` int64 [num_reqs] the requests' slots in the target's state, `sampled` says whether its drafts
    come with their logits. `num_drafts` tokens are drafted for each, 0 where only prompts are read. `keep` holds tensors that
    must live until the job has ended.
    """

    number: int
    slot: int
    request_ids: frozenset[str]
    idx: Any
    num_reqs: int
    sampled: bool
    num_drafts: int = 0
    keep: tuple[Any, ...] = ()

    @property
    def ticket(self) -> JobTicket:
        """Where its stamps lie."""
        return JobTicket(self.number, self.num_reqs, self.num_drafts)


class PendingJobs:
    """Jobs that have not landed, oldest first. They land in order, so that newer drafts of a request replace older ones."""

    def __init__(self, depth: int) -> None:
        """`depth` is the length of the ring that the jobs' results lie in."""
        self._jobs: deque[DraftJob] = deque()
        self._depth = depth

    def add(self, job: DraftJob) -> None:
        """A job was started."""
        self._jobs.append(job)

    def due(self, request_ids: Collection[str]) -> list[DraftJob]:
        """Take out the jobs that have to land before drafts of these requests are verified."""
        last = max((index for index, job in enumerate(self._jobs) if not job.request_ids.isdisjoint(request_ids)), default=-1)
        return [self._jobs.popleft() for _ in range(last + 1)]

    def overdue(self) -> list[DraftJob]:
        """Take out the jobs that have to land before another one is started, for want of room."""
        return [self._jobs.popleft() for _ in range(len(self._jobs) - self._depth + 1)]
