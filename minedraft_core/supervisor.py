"""Keeps a drafter at work and keeps its faults away from the requests.

The engine loop talks to the supervisor only. A drafter that dies, hangs or answers nonsense is closed and started anew after a
growing pause; until it is back, and while it is behind, the target goes on without drafts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from minedraft_core.config import DrafterConfig
from minedraft_core.drafter import Drafter, DrafterError
from minedraft_core.ledger import Context, DraftLedger
from minedraft_core.types import Draft, DraftBatch, DrafterRecord, DraftResult

_PATIENCE_FACTOR = 4.0
_PATIENCE_MIN = 0.25
_FIRST_DURATION = 0.5
_RECENT_ANSWERS = 64
_POLL_START = 0.05
_MOST_DOUBLINGS = 64


@dataclass(frozen=True)
class Gathered:
    """What came back from the drafter.

    `drafts` are those asked for that are here; `late` counts tokens that nobody waits for any more, `lost` tokens that a fault took;
    `answers` are all answers received; `waited` is in seconds; `reason` says why requests that should have drafts have none ("late"
    or "down"), or is None.
    """

    drafts: dict[str, Draft] = field(default_factory=dict)
    late: int = 0
    lost: int = 0
    answers: list[DraftResult] = field(default_factory=list)
    waited: float = 0.0
    reason: str | None = None


@dataclass
class _Inbox:
    drafts: dict[str, Draft] = field(default_factory=dict)
    late: int = 0
    answers: list[DraftResult] = field(default_factory=list)


class Drafting(Protocol):
    """The drafting that an engine loop does: with a supervised drafter, or none at all."""

    def order(self, contexts: Mapping[str, Context], num_tokens: int, ahead: int = 0) -> None:
        """Ask for up to `num_tokens` draft tokens for each request, and for `ahead` more to be made ready."""
        ...

    def gather(self, request_ids: Collection[str]) -> Gathered:
        """Wait for the drafts of these requests, within reason. Those of others stay until they are asked for."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended or lost its place."""
        ...

    def close(self) -> None:
        """End the drafter."""
        ...


class NoDrafting:
    """Plain decoding: nobody drafts."""

    def order(self, contexts: Mapping[str, Context], num_tokens: int, ahead: int = 0) -> None:
        """Nothing to do."""

    def gather(self, request_ids: Collection[str]) -> Gathered:
        """Nothing comes."""
        return Gathered()

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to end."""


class DraftSupervisor:
    """One drafter and the orders it has.

    `launch` starts a drafter without waiting for it. `report` gets a record for each change of health. `vocab_size` bounds the tokens that
    count as an answer.
    """

    def __init__(
        self,
        launch: Callable[[], Drafter],
        config: DrafterConfig,
        vocab_size: int,
        report: Callable[[DrafterRecord], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch, self._config, self._vocab_size, self._report, self._clock = launch, config, vocab_size, report, clock
        self._ledger = DraftLedger()
        self._unanswered: dict[int, tuple[DraftBatch, float]] = {}
        self._given_up: set[int] = set()
        self._inbox = _Inbox()
        self._lost = 0
        self._durations: deque[float] = deque(maxlen=_RECENT_ANSWERS)
        self._failures = 0
        self._launches = 0
        self._retry_at = 0.0
        self._drafter: Drafter | None = None
        self._up = False
        self._launched_at = 0.0

    @property
    def up(self) -> bool:
        """Whether the drafter is loaded and answers."""
        return self._up

    def start(self) -> None:
        """Launch the drafter and wait until it is loaded. Raises DrafterError where it cannot be."""
        self._launched_at = self._clock()
        self._launches += 1
        drafter = self._drafter = self._launch()
        try:
            self._await_ready(drafter)
        except DrafterError:
            drafter.close()
            raise
        self._mark_up()

    def order(self, contexts: Mapping[str, Context], num_tokens: int, ahead: int = 0) -> None:
        """Ask for drafts, unless the drafter is down or still owes answers that are late."""
        self._check()
        if not contexts or not self._up or self._given_up:
            return
        for request_id in contexts:
            self._set_aside(request_id)
        batch = self._ledger.order(contexts, num_tokens, ahead)
        self._unanswered[batch.round] = (batch, self._clock())
        with self._faults_contained():
            self._working().start(batch)

    def gather(self, request_ids: Collection[str]) -> Gathered:
        """Wait for these requests' drafts up to a few times what drafting took lately; who has none then goes on without."""
        begin = self._clock()
        self._check()
        deadline = begin + (0.0 if self._given_up else self._patience())
        self._receive(0.0)
        while self._up and self._ledger.waiting(request_ids) and (left := deadline - self._clock()) > 0:
            self._receive(left)
        inbox = self._inbox
        drafts = {request_id: inbox.drafts.pop(request_id) for request_id in request_ids if request_id in inbox.drafts}
        self._inbox = _Inbox(inbox.drafts)
        lost, self._lost = self._lost, 0
        reason = None
        if not self._up:
            reason = "down"
        elif overdue := self._ledger.waiting(request_ids):
            reason = "late"
            self._given_up |= self._unanswered.keys()
            self._ledger.give_up(overdue)
        elif self._given_up and not drafts.keys() >= set(request_ids):
            reason = "late"
        return Gathered(drafts, inbox.late, lost, inbox.answers, self._clock() - begin, reason)

    def look_after(self) -> None:
        """Notice what became of the drafter, and start it anew where that is due; `order` and `gather` do so too."""
        self._check()
        self._receive(0.0)

    def forget(self, request_id: str) -> None:
        """Tell the drafter to free a request."""
        self._set_aside(request_id)
        if self._ledger.forget(request_id) and self._up:
            with self._faults_contained():
                self._working().forget([request_id])

    def _set_aside(self, request_id: str) -> None:
        """A draft that nobody asked for in time."""
        if (draft := self._inbox.drafts.pop(request_id, None)) is not None:
            self._inbox.late += len(draft.tokens)

    def close(self) -> None:
        """End the drafter."""
        if self._drafter is not None:
            self._drafter.close()
        self._drafter, self._up = None, False

    def _await_ready(self, drafter: Drafter) -> None:
        while not drafter.ready():
            self._check_load_time()
            time.sleep(_POLL_START)

    def _check_load_time(self) -> None:
        if self._clock() - self._launched_at > self._config.start_timeout:
            raise DrafterError("hang", f"the draft model was not loaded within {self._config.start_timeout:g} s")

    def _working(self) -> Drafter:
        assert self._drafter is not None
        return self._drafter

    @contextmanager
    def _faults_contained(self) -> Iterator[None]:
        try:
            yield
        except DrafterError as fault:
            self._fail(fault)

    def _receive(self, wait: float) -> None:
        """Settle what arrives within `wait` seconds and keep it in the inbox."""
        with self._faults_contained():
            if not self._up:
                return
            for answer in self._working().collect(wait):
                batch, _ = self._unanswered.pop(answer.round, (None, 0.0))
                if batch is None:
                    raise DrafterError("rubbish", f"an answer to order {answer.round}, which is not open")
                self._lost += sum(map(len, answer.tokens))
                self._validate(batch, answer)
                self._lost -= sum(map(len, answer.tokens))
                self._durations.append(answer.span.duration_us / 1e6)
                self._given_up.discard(answer.round)
                self._failures = 0
                drafts, late = self._ledger.settle(answer)
                self._inbox.answers.append(answer)
                self._inbox.drafts.update(drafts)
                self._inbox.late += late

    def _validate(self, batch: DraftBatch, answer: DraftResult) -> None:
        if answer.request_ids != [item.request_id for item in batch.items] or len(answer.tokens) != len(answer.request_ids):
            raise DrafterError("rubbish", f"the answer to order {batch.round} is for other requests than asked")
        for item, row in zip(batch.items, answer.tokens, strict=True):
            if len(row) > item.limit or any(not 0 <= token < self._vocab_size for token in row):
                raise DrafterError("rubbish", f"the answer to order {batch.round} holds a draft that is too long or no token: {row}")
        if answer.logprobs is None:
            return
        if [len(row) for row in answer.logprobs] != [len(row) for row in answer.tokens]:
            raise DrafterError("rubbish", f"the answer to order {batch.round} holds other log-probabilities than tokens")
        if not all(logprob <= 0 for row in answer.logprobs for logprob in row):
            raise DrafterError("rubbish", f"the answer to order {batch.round} holds what is no log-probability")

    def _patience(self) -> float:
        longest = max(self._durations, default=_FIRST_DURATION)
        return min(self._config.answer_timeout, max(_PATIENCE_MIN, _PATIENCE_FACTOR * longest))

    def _check(self) -> None:
        """Relaunch what is due, notice what is loaded and what hangs."""
        now = self._clock()
        if self._drafter is None:
            if now >= self._retry_at:
                self._relaunch()
        elif not self._up:
            with self._faults_contained():
                if self._drafter.ready():
                    self._mark_up()
                else:
                    self._check_load_time()
        elif self._overdue(now):
            # Answers may have come while no request ran; the engine loop's own pause is not the drafter's.
            self._receive(0.0)
            with self._faults_contained():
                if self._overdue(now):
                    raise DrafterError("hang", f"no answer for {self._config.answer_timeout:g} s")

    def _overdue(self, now: float) -> bool:
        oldest = min((sent_at for _, sent_at in self._unanswered.values()), default=now)
        return now - oldest > self._config.answer_timeout

    def _relaunch(self) -> None:
        self._launched_at = self._clock()
        self._launches += 1
        with self._faults_contained():
            self._drafter = self._launch()

    def _mark_up(self) -> None:
        self._up = True
        self._report(DrafterRecord(up=True, restarted=self._launches > 1, reason="loaded"))

    def _fail(self, fault: DrafterError) -> None:
        if self._drafter is not None:
            self._drafter.close()
        self._drafter, self._up = None, False
        pause = min(self._config.restart_backoff * 2.0 ** min(self._failures, _MOST_DOUBLINGS), self._config.restart_backoff_max)
        self._failures += 1
        self._retry_at = self._clock() + pause
        self._ledger.reset()
        self._unanswered.clear()
        self._given_up.clear()
        self._durations.clear()
        self._lost += sum(len(draft.tokens) for draft in self._inbox.drafts.values())
        self._inbox.drafts.clear()
        self._report(DrafterRecord(up=False, restarted=False, reason=fault.reason, message=str(fault)))
