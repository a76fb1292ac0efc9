"""The data files: one for each published experiment, and what each of its variants runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minedraft_core.config import MOST_DRAFTS, ConfigError

_PACKAGE = "minedraft_core.experiments"
_DEFAULTS = "defaults"

VariantName = Literal["paper", "synthetic", "cpu"]
ModeName = Literal["off", "sequential", "parallel", "pearl", "native"]
Positive = Annotated[int, Field(ge=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pair(_Frozen):
    """Target and drafter: folders or names, `embedded`, `shape:NAME` for dummy weights, and `layers:N` for the target's first layers.

    `acceptance` is the probability that a draft token is right given that all before it are: on CPU what plain decoding wrote is replayed
    so, on GPUs vLLM accepts at random; None leaves it to the drafter. `method` is that of `--speculative-config`.
    """

    target: str
    draft: str
    method: str | None = None
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = None


class Dataset(_Frozen):
    """Prompts by name, of at least and at most so many tokens. `shipped` comes along, `random` is made; others are files."""

    name: str
    min_tokens: int = 1
    max_tokens: int | None = None


class Variant(_Frozen):
    """What one variant of an experiment runs.

    Every mode runs at every load: `loads` times `batch` requests at once. `extra` are the extra proposals of TETRIS, whose arms run at
    `tetris_loads`. `n` are samples of a prompt. Before the runs of an arm, or of an engine where `warmup_once`, come `warmup` runs that
    leave no figures. `tensor_parallel` is the target's number of GPUs, 0 on CPU. `seeded` gives every request a seed of its own.
    """

    note: str = ""
    modes: tuple[ModeName, ...]
    pairs: tuple[Pair, ...]
    batch: tuple[Positive, ...]
    loads: tuple[Positive, ...]
    tetris_loads: tuple[Positive, ...]
    n: tuple[Positive, ...]
    k: tuple[Annotated[int, Field(ge=1, le=MOST_DRAFTS)], ...]
    extra: tuple[Positive, ...]
    datasets: tuple[Dataset, ...]
    prompts: Positive
    prompt_tokens: Positive | None = None
    max_tokens: Annotated[int, Field(ge=2)]
    max_model_len: Positive
    temperature: Annotated[float, Field(ge=0)]
    temperature_of_several: Annotated[float, Field(gt=0)]
    warmup: Annotated[int, Field(ge=0)]
    warmup_once: bool = False
    runs: Positive
    seeded: bool = False
    profile: bool = False
    tensor_parallel: Annotated[int, Field(ge=0)]
    flags: tuple[str, ...]

    def temperature_for(self, n: int) -> float:
        """Sampling temperature for so many samples of a prompt."""
        return self.temperature if n == 1 else self.temperature_of_several


class Experiment(_Frozen):
    """One published experiment."""

    name: str
    title: str
    variants: dict[VariantName, Variant]


def catalogue() -> dict[str, Experiment]:
    """All experiments by name, in order. Raises ConfigError where a data file is not what it should be."""
    folder = files(_PACKAGE).joinpath("data")
    sources = {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".toml")
    }
    defaults = tomllib.loads(sources.pop(_DEFAULTS))
    return {name: read_experiment(name, tomllib.loads(sources[name]), defaults) for name in sorted(sources)}


def read_experiment(name: str, content: Mapping[str, Any], defaults: Mapping[str, Any]) -> Experiment:
    """An experiment from its file and the defaults. Raises ConfigError that names the file, the key and what is allowed."""
    paper = defaults["paper"] | content["paper"]
    variants = {"paper": paper, "synthetic": paper | defaults["synthetic"] | content["synthetic"], "cpu": defaults["cpu"] | content["cpu"]}
    try:
        return Experiment.model_validate({"name": name, "title": content["title"], "variants": variants})
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"{name}.toml: {faults}") from None
