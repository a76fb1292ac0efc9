"""Records that travel between the parts of the pipeline. All are frozen; times are microseconds on the host's monotonic clock."""

from __future__ import annotations

import enum
import time
from typing import Annotated

import msgspec

# The key of a request's `extra_args` that holds its own limit of draft tokens a step.
DRAFT_LIMIT = "minedraft_num_speculative_tokens"


class Mode(enum.StrEnum):
    """How often the target visits a request, and therefore what overlaps."""

    OFF = "off"
    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    PEARL = "pearl"


class Side(enum.IntEnum):
    """One of the two batches that the target verifies in turn."""

    A = 0
    B = 1

    @property
    def other(self) -> Side:
        """The side that drafts while this one is verified."""
        return Side.B if self is Side.A else Side.A


class Span(msgspec.Struct, frozen=True):
    """A closed interval of time, in microseconds."""

    start_us: int
    end_us: int

    @property
    def duration_us(self) -> int:
        """Length of the interval, never negative."""
        return max(0, self.end_us - self.start_us)


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the target draws a request's tokens: at `temperature`, above 0, with the noise of `seed`, beginning after `prompt_len` tokens."""

    temperature: float
    seed: int
    prompt_len: int


class DraftItem(msgspec.Struct, frozen=True, array_like=True):
    """What the drafter has to learn about one request before it drafts for it.

    The first `base` tokens of its context are known to the drafter; `tokens` follow them. At most `limit` tokens are of use.
    `sampling` is none for a greedy request.
    """

    request_id: str
    base: int
    tokens: list[int]
    limit: int
    sampling: Sampling | None = None


class DraftBatch(msgspec.Struct, frozen=True, tag="draft"):
    """One order to the drafter: propose up to `num_tokens` tokens for each item. `round` grows with every order.

    Once it has answered and has nothing else to do, the drafter goes on for `ahead` further tokens of each item (lookahead).
    """

    round: int
    num_tokens: int
    items: list[DraftItem]
    ahead: int = 0


Count = Annotated[int, msgspec.Meta(ge=0)]


class Lookahead(msgspec.Struct, frozen=True):
    """What became of the tokens drafted ahead, since the last answer that told.

    `hits` and `misses` count the drafts that were gone on with: a hit is one where all that the target delivered was on the drafter's own
    chain, its last token too. `discarded` are tokens drafted ahead that no one can use. `span` is the time spent on drafting ahead.
    """

    hits: Count
    misses: Count
    discarded: Count
    span: Span


class Draft(msgspec.Struct, frozen=True):
    """The draft tokens of one request and the log-probability of each given those before it; none where they are not known."""

    tokens: list[int]
    logprobs: list[float] = []


class DraftResult(msgspec.Struct, frozen=True, tag="drafts"):
    """The drafter's answer to the order with the same `round`.

    `tokens` is [n, k], row i for `request_ids[i]`; a row is empty where the drafter had no room for the request.
    `logprobs` is [n, k] or none; `distributions` is [n, k, vocabulary] or none. Without distributions a token is the argmax, or drawn
    with the noise that the target uses at its place: either way a function of the context and that noise. `lookahead` is none where
    nothing was drafted ahead.
    """

    round: int
    request_ids: list[str]
    tokens: list[list[int]]
    span: Span
    logprobs: list[list[float]] | None = None
    distributions: list[list[list[float]]] | None = None
    lookahead: Lookahead | None = None


class TraceStep(msgspec.Struct, frozen=True, tag="step"):
    """One pass of the target, from the end of scheduling to the return of its output: the fields of a line of the trace, in order.

    `measured_*_time` are seconds; `measured_draft_time` is what the drafts verified here took the drafter, `measured_overhead_time`
    is what the engine loop spent on scheduling and bookkeeping. `gap_us` is how long the target was idle since its previous pass while
    requests ran, none where none ran. `side` is -1 where no side was due. `drafter_wait_us` is how long the step waited for the
    drafter, none where no draft was due. `drafts` holds (drafted, accepted) for each verified draft.
    """

    step: int
    start_us: int
    end_us: int
    mode: Mode
    side: int
    is_prompt_run: bool
    is_parallelised: bool
    batched_requests: int
    preempted_requests: int
    batched_token_num: int
    proposed_len: int
    verify_len: int
    accepted_num: int
    generated_num: int
    measured_draft_time: float
    measured_target_time: float
    measured_overhead_time: float
    gap_us: int | None
    num_speculative_tokens: int
    drafter_wait_us: int | None
    drafts: list[tuple[int, int]]


class StepRecord(TraceStep, frozen=True, tag="step"):
    """A pass with what the metrics need besides the trace.

    `side_requests` are the running requests of each side. `dropped` counts draft tokens that were not verified, by reason.
    `fallback_reason` says why due drafts were missing.
    """

    side_requests: tuple[int, int]
    dropped: dict[str, int]
    fallback_reason: str | None = None


class RequestRecord(msgspec.Struct, frozen=True, tag="request"):
    """One finished request (each choice of an n > 1 request is one).

    `first_token_us` is 0 where no token came; `scheduled_us`, when its prompt was first scheduled, is 0 where that is not known.
    """

    request_id: str
    start_us: int
    first_token_us: int
    end_us: int
    prompt_len: int
    gen_len: int
    finish_reason: str
    scheduled_us: int = 0


class Job(msgspec.Struct, frozen=True):
    """A request of a measurement, which gets exactly `max_tokens` tokens; `seed` makes a sample repeatable, none leaves it to chance."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int | None = None


class DraftRecord(msgspec.Struct, frozen=True, tag="drafted"):
    """One answered order: how long the drafter worked, how much of that the target's passes hid, tokens proposed per position."""

    round: int
    start_us: int
    end_us: int
    hidden_us: int
    batched_requests: int
    drafted_per_position: list[int]


class LookaheadRecord(msgspec.Struct, frozen=True, tag="ahead"):
    """What an answer told of tokens drafted ahead, and how much of that time the target's passes hid."""

    start_us: int
    end_us: int
    hidden_us: int
    hits: int
    misses: int
    discarded: int


class DrafterRecord(msgspec.Struct, frozen=True, tag="drafter"):
    """A change in the drafter's health. `restarted` is set on the change that a restart made; `message` says what went wrong."""

    up: bool
    restarted: bool
    reason: str
    message: str = ""


class ModeRecord(msgspec.Struct, frozen=True, tag="mode"):
    """The mode and the number of draft tokens in force from now on."""

    mode: Mode
    num_speculative_tokens: int


Record = StepRecord | RequestRecord | DraftRecord | LookaheadRecord | DrafterRecord | ModeRecord


def now_us() -> int:
    """The host's monotonic clock in microseconds; comparable between processes of one host."""
    return time.monotonic_ns() // 1000
