"""A small variant, and an engine that decodes by rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minedraft_core.config import ConfigError, PipelineConfig
from minedraft_core.control import ModeOrder
from minedraft_core.cores import Cores
from minedraft_core.experiments.catalogue import Variant
from minedraft_core.experiments.grid import Session
from minedraft_core.experiments.runner import Surroundings
from minedraft_core.experiments.store import Store
from minedraft_core.types import Job, Mode, Record, RequestRecord
from tests.bench.samples import step


def variant(**changes: Any) -> Variant:
    values: dict[str, Any] = {
        "modes": ["off", "sequential", "parallel"],
        "pairs": [{"target": "target", "draft": "draft"}],
        "batch": [2],
        "loads": [1, 2],
        "tetris_loads": [2],
        "n": [1],
        "k": [1, 3],
        "extra": [],
        "datasets": [{"name": "questions", "max_tokens": 9}],
        "prompts": 2,
        "max_tokens": 4,
        "max_model_len": 32,
        "temperature": 1.0,
        "temperature_of_several": 0.8,
        "warmup": 1,
        "runs": 2,
        "seeded": True,
        "tensor_parallel": 0,
        "flags": [],
    }
    return Variant.model_validate({**values, **changes})


class RuleEngine:
    """Tokenizes a text to as many tokens as it has letters, and writes that length again and again."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log
        self._records: list[Record] = []

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        return [[len(prompt)] * len(prompt) for prompt in prompts]

    def random_prompts(self, count: int, length: int) -> list[list[int]]:
        return [[7] * length for _ in range(count)]

    def set_mode(self, order: ModeOrder) -> None:
        self._log.append(("mode", order.mode, order.num_speculative_tokens))

    def serve(self, jobs: Sequence[Job], load: int) -> tuple[list[list[int]], list[RequestRecord]]:
        self._log.append(("run", load, [len(job.prompt) for job in jobs], [job.seed for job in jobs], {job.temperature for job in jobs}))
        outputs = [[len(job.prompt)] * job.max_tokens for job in jobs]
        self._records = [step(1, 0, 10, running=load, generated=sum(map(len, outputs)), mode=Mode.OFF)]
        return outputs, [RequestRecord(str(number), 1, 2, 9, 3, job.max_tokens, "length", 2) for number, job in enumerate(jobs)]

    def take_records(self, num_tokens: int) -> list[Record]:
        taken, self._records = self._records, []
        return taken


class Starter:
    """Starts engines by rule; those of a mode in `refused` are refused."""

    def __init__(self, *refused: str) -> None:
        self.log: list[Any] = []
        self._refused = refused

    @contextmanager
    def __call__(self, session: Session, config: PipelineConfig) -> Iterator[RuleEngine]:
        if session.mode in self._refused:
            raise ConfigError(f"no {session.mode} here")
        self.log.append(("start", session.name, config))
        yield RuleEngine(self.log)
        self.log.append(("end",))

    def of(self, kind: str) -> list[Any]:
        return [entry for entry in self.log if entry[0] == kind]


def surroundings(folder: Path, chosen: Variant) -> Surroundings:
    return Surroundings(
        experiment="experiment_0",
        variant_name="cpu",
        variant=chosen,
        prompts={"questions": ["a", "bb", "much too long", "ccc"]},
        store=Store(folder),
        cores=Cores((0,), (1,)),
        describe=lambda: {"commit": "1234"},
        models=lambda session: (session.target, None if session.draft is None else session.draft.draft),
    )
