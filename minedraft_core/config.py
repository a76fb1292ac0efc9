"""The speculative configuration and how the drafter is run, validated once."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minedraft_core.types import Mode


class ConfigError(ValueError):
    """A setting that cannot be served; the message names the key, the value and what is allowed."""


class MineDraftConfig(BaseModel):
    """The keys of `--speculative-config`.

    `is_parallel` makes two sides of the requests (MineDraft, arXiv 2603.18016); without it the target waits for the drafter.
    Without a `model`, or with 0 draft tokens, the target decodes alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: Literal["draft_model"] | None = Field(default=None, description="how drafts are made; null means draft_model")
    model: Annotated[str, Field(min_length=1)] | None = Field(default=None, description="folder or name of the draft model")
    draft_tensor_parallel_size: Annotated[int, Field(ge=1, le=1)] = Field(
        default=1, description="devices the drafter is split over; only 1"
    )
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = Field(default=0, description="draft tokens a step, 0 to 64")
    is_parallel: bool = Field(default=False, description="true: two sides, drafting hidden behind verification")

    @property
    def mode(self) -> Mode:
        """The mode these keys ask for."""
        if self.model is None or self.num_speculative_tokens == 0:
            return Mode.OFF
        return Mode.PARALLEL if self.is_parallel else Mode.SEQUENTIAL

    @classmethod
    def parse(cls, source: str | dict[str, Any] | None) -> Self:
        """Read the keys from a JSON object or a mapping; None gives the defaults.

        Raises ConfigError with one line per fault, each with key, value and what is allowed.
        """
        if source is None:
            return cls()
        if isinstance(source, str):
            try:
                source = json.loads(source)
            except json.JSONDecodeError as error:
                raise ConfigError(f"--speculative-config is not valid JSON: {error}; give an object such as {_EXAMPLE}") from error
        if not isinstance(source, dict):
            raise ConfigError(f"--speculative-config must be a JSON object, not {json.dumps(source)}; for example {_EXAMPLE}")
        try:
            return cls.model_validate(source)
        except ValidationError as error:
            raise ConfigError("\n".join(cls._explain(fault) for fault in error.errors())) from None

    @classmethod
    def _explain(cls, fault: Any) -> str:
        key = ".".join(str(part) for part in fault["loc"][:1])
        if fault["type"] == "extra_forbidden":
            return f"--speculative-config: unknown key {key!r} (value {fault['input']!r}); allowed keys: {', '.join(cls.model_fields)}"
        return f"--speculative-config: {key!r} cannot be {fault['input']!r}; allowed: {cls.model_fields[key].description}"


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
    synthetic_acceptance_length: float | None = Field(
        default=None, ge=1, description="for benchmarks on GPUs: mean acceptance length, whatever is drafted"
    )


class PipelineConfig(BaseModel):
    """Everything the engine's side of the pipeline needs; travels as JSON inside vLLM's `additional_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    speculative: MineDraftConfig = MineDraftConfig()
    drafter: DrafterConfig = DrafterConfig()
    target_cores: tuple[int, ...] = Field(default=(), description="CPU cores of the target; empty leaves the choice to the system")
    control_address: str | None = Field(default=None, description="where the engine takes orders (a ZeroMQ address); none: nowhere")
    feed_address: str | None = Field(default=None, description="where the engine pushes its records (a ZeroMQ address); none: nowhere")
