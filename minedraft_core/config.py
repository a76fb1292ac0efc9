"""The speculative configuration and how the drafter is run, validated once."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator

from minedraft_core.types import Mode


class ConfigError(ValueError):
    """A setting that cannot be served; the message names the key, the value and what is allowed."""


MOST_DRAFTS = 64
"""Draft tokens a step that are possible at most."""

HEADS = ("eagle", "eagle3")
"""Methods whose drafter is a head on the target's hidden states (EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840)."""


BatchSizes = Annotated[
    tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1, le=MOST_DRAFTS)]], Strict(strict=False)
]
"""Smallest and largest batch, and its draft tokens a request."""


def read_json(text: str) -> Any:
    """What the text of a setting holds. Raises ValueError where it is not JSON, or more than Python reads."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class MineDraftConfig(BaseModel):
    """The keys of `--speculative-config`.

    `is_parallel` makes two sides of the requests (MineDraft, arXiv 2603.18016), with `force_pearl` one side and a drafter that goes on
    while the target verifies (PEARL, arXiv 2408.11850); without it the target waits for the drafter. `tetris` verifies the draft tokens
    of a batch that are most likely accepted (arXiv 2502.15197); its other keys say nothing without it. Without a `model`, or with 0
    draft tokens, the target decodes alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: Literal["draft_model", "eagle", "eagle3"] | None = Field(
        default=None, description="null or draft_model: a draft model; eagle or eagle3: a head on the target's hidden states, on GPUs"
    )
    model: Annotated[str, Field(min_length=1)] | None = Field(default=None, description="folder or name of the draft model or head")
    draft_tensor_parallel_size: Annotated[int, Field(ge=1, le=1)] = Field(
        default=1, description="devices the drafter is split over; only 1"
    )
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MOST_DRAFTS)] = Field(
        default=0, description=f"draft tokens a step, 0 to {MOST_DRAFTS}"
    )
    num_speculative_tokens_per_batch_size: Annotated[tuple[BatchSizes, ...], Strict(strict=False), Field(min_length=1)] | None = Field(
        default=None,
        description="rows [smallest, largest, tokens] of batch sizes: draft tokens by how many requests a pass has, 1 to "
        "`num_speculative_tokens`, such as [[1, 16, 4], [17, 64, 3], [65, 256, 1]]; what no row names follows the row before",
    )
    is_parallel: bool = Field(default=False, description="true: two sides, drafting hidden behind verification")
    force_pearl: bool = Field(default=False, description="true: with `is_parallel`, lookahead (PEARL) in place of two sides")
    tetris: bool = Field(default=False, description="true: verify the draft tokens of a batch that are most likely accepted (TETRIS)")
    tetris_turn_on_batch_size: Annotated[int, Field(ge=0)] = Field(
        default=1,
        description="smallest batch that TETRIS works on, 0 or more; smaller ones are drafted for and verified as without it",
    )
    tetris_capacity: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="draft tokens that TETRIS verifies in a batch, 0 or more; 0: `num_speculative_tokens` x the requests of a full batch",
    )
    tetris_extra_proposals: Annotated[int, Field(ge=0, lt=MOST_DRAFTS)] = Field(
        default=0,
        description=f"draft tokens beyond `num_speculative_tokens` that TETRIS chooses from, 0 to {MOST_DRAFTS - 1}; "
        f"both together at most {MOST_DRAFTS}",
    )
    draft_temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = Field(
        default=None,
        description="temperature at which drafts of sampling requests are drawn, 0 to 100; 0: the most likely tokens; "
        "null: the request's own; on CPU",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.force_pearl and not self.is_parallel:
            raise ValueError("'force_pearl' puts lookahead in the place of two sides: set 'is_parallel' to true, or remove 'force_pearl'")
        if self.method in HEADS and self.force_pearl:
            raise ValueError(
                f"'force_pearl' and {self.method!r} exclude each other: a head cannot go on before the target's hidden states have come; "
                "remove 'force_pearl', or take a draft model"
            )
        if self.method in HEADS and self.model is None:
            raise ValueError(f"'method' {self.method!r} needs a head: set 'model' to its folder or name")
        if self.longest_draft > MOST_DRAFTS:
            raise ValueError(
                f"'num_speculative_tokens' and 'tetris_extra_proposals' are {self.longest_draft} together; at most {MOST_DRAFTS} can be"
            )
        if self.tetris and not self.num_speculative_tokens:
            raise ValueError("'tetris' chooses from draft tokens: set 'num_speculative_tokens' to 1 or more, or remove 'tetris'")
        if self.num_speculative_tokens_per_batch_size is not None:
            self._check_batch_sizes(self.num_speculative_tokens_per_batch_size)
        return self

    def _check_batch_sizes(self, rows: tuple[BatchSizes, ...]) -> None:
        name = "'num_speculative_tokens_per_batch_size'"
        for other in ("tetris", "force_pearl"):
            if getattr(self, other):
                raise ValueError(f"{name} and {other!r} exclude each other: both say how much is drafted; remove one of them")
        if rows[0][0] != 1:
            raise ValueError(f"{name} begins with batches of {rows[0][0]} requests: let the first row begin with 1")
        last = 0
        for smallest, largest, tokens in rows:
            if smallest > largest:
                raise ValueError(f"{name} has a row from {smallest} to {largest}: put the smaller number first")
            if smallest <= last:
                raise ValueError(f"{name} has rows that overlap or fall at {smallest}: let every row begin after the one before ends")
            if tokens > self.num_speculative_tokens:
                raise ValueError(
                    f"{name} asks for {tokens} tokens: raise 'num_speculative_tokens' ({self.num_speculative_tokens}), which is the most"
                )
            last = largest

    @property
    def mode(self) -> Mode:
        """The mode these keys ask for."""
        if self.model is None or self.num_speculative_tokens == 0:
            return Mode.OFF
        if not self.is_parallel:
            return Mode.SEQUENTIAL
        return Mode.PEARL if self.force_pearl else Mode.PARALLEL

    @property
    def longest_draft(self) -> int:
        """Draft tokens of a request that may be verified in a pass."""
        return self.num_speculative_tokens + (self.tetris_extra_proposals if self.tetris else 0)

    def check_on_gpus(self) -> None:
        """Raise ConfigError for what only the CPU pipeline knows."""
        if self.force_pearl and self.tetris:
            raise ConfigError("--speculative-config: 'tetris' does not go with 'force_pearl' on GPUs in this version: remove one of them")
        if self.draft_temperature is not None:
            raise ConfigError("--speculative-config: 'draft_temperature' works on CPU only in this version: remove it")

    def check_on_cpu(self) -> None:
        """Raise ConfigError for keys that only the GPU pipeline knows."""
        if self.method in HEADS:
            raise ConfigError(
                f"--speculative-config: 'method' {self.method!r} works on GPUs only: a head reads the target's hidden states, which the "
                "draft process on CPU does not get; take a draft model"
            )

    @classmethod
    def parse(cls, source: str | dict[str, Any] | None, setting: str = "--speculative-config") -> Self:
        """Read the keys from a JSON object or a mapping; None gives the defaults.

        Raises ConfigError with one line per key at fault, each with `setting`, key, value and what is allowed.
        """
        if source is None:
            return cls()
        if isinstance(source, str):
            try:
                source = read_json(source)
            except ValueError as error:
                raise ConfigError(f"{setting} is not valid JSON: {error}; give an object such as {_EXAMPLE}") from error
        if not isinstance(source, dict):
            raise ConfigError(f"{setting} must be a JSON object, not {json.dumps(source)}; for example {_EXAMPLE}")
        try:
            return cls.model_validate(source)
        except ValidationError as error:
            # Of a list, each item at fault has its own error, and the list has one where no item is left.
            first = {fault["loc"][:1]: fault for fault in reversed(error.errors())}
            lines = [f"{setting}: {cls._explain(fault, source)}" for fault in reversed(first.values())]
            raise ConfigError("\n".join(lines)) from None

    @classmethod
    def _explain(cls, fault: Any, source: dict[str, Any]) -> str:
        if not fault["loc"]:
            return str(fault["ctx"]["error"])
        key, *place = fault["loc"]
        if fault["type"] == "extra_forbidden":
            return f"unknown key {key!r} (value {fault['input']!r}); allowed keys: {', '.join(cls.model_fields)}"
        wrong = f"have the row {source[key][place[0]]!r}" if place else f"be {fault['input']!r}"
        return f"{key!r} cannot {wrong}; allowed: {cls.model_fields[key].description}"


_EXAMPLE = '{"model": "path/to/draft", "num_speculative_tokens": 4, "is_parallel": true}'


class DrafterConfig(BaseModel):
    """How the draft process is run and when it counts as failed. All times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cores: tuple[int, ...] = Field(default=(), description="CPU cores of the draft process; empty leaves the choice to the system")
    start_timeout: float = Field(default=300.0, gt=0, description="time to load the draft model")
    answer_timeout: float = Field(default=10.0, gt=0, description="an order unanswered for so long means the drafter hangs")
    restart_backoff: float = Field(default=1.0, gt=0, description="wait before the first restart; doubles with each failure in a row")
    restart_backoff_max: float = Field(default=60.0, gt=0, description="longest wait before a restart")
    replay: str | None = Field(default=None, description="for benchmarks: a file of token sequences to propose from")
    replay_acceptance: float = Field(default=1.0, ge=0, le=1, description="for benchmarks: how often a replayed token is proposed")
    device: int | None = Field(default=None, ge=0, description="CUDA device of the drafter; none: the first after the target's")
    compiled: bool = Field(default=False, description="on GPUs: compile the drafter as vLLM compiles the target")
    fused: Literal["auto", "none", "attention", "layers"] = Field(
        default="auto",
        description="on GPUs, what of a draft step runs in our own kernels: nothing, attention with the write of its KV, or whole layers; "
        "auto is whole layers on Hopper GPUs where they can run the draft model, else nothing",
    )
    weights: Literal["as_saved", "fp8"] = Field(
        default="as_saved",
        description="on GPUs, the drafter's linear layers and output head: as saved, or in 8 bits, read in half the time by fused layers",
    )
    steps_ahead: int | None = Field(
        default=None, ge=0, description="for tests on GPUs: draft steps that `pearl` goes ahead; none: as many as the times allow"
    )
    synthetic_acceptance_length: float | None = Field(
        default=None, ge=1, description="for benchmarks on GPUs: mean acceptance length, whatever is drafted"
    )
    synthetic_acceptance: float | None = Field(
        default=None, ge=0, le=1, description="likewise: how often a draft is accepted if those before it were, whatever is drafted"
    )


class PipelineConfig(BaseModel):
    """Everything the engine's side of the pipeline needs; travels as JSON inside vLLM's `additional_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    speculative: MineDraftConfig = MineDraftConfig()
    drafter: DrafterConfig = DrafterConfig()
    target_cores: tuple[int, ...] = Field(default=(), description="CPU cores of the target; empty leaves the choice to the system")
    control_address: str | None = Field(default=None, description="where the engine takes orders (a ZeroMQ address); none: nowhere")
    feed_address: str | None = Field(default=None, description="where the engine pushes its records (a ZeroMQ address); none: nowhere")
