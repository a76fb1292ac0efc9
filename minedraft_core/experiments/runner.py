"""Carries out one session: an engine, and on it every cell that has no trace yet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from minedraft_core.bench.runner import SHARED_DEVICE, Tell
from minedraft_core.config import ConfigError, DrafterConfig, MineDraftConfig, PipelineConfig
from minedraft_core.control import ModeOrder
from minedraft_core.cores import Cores
from minedraft_core.experiments.catalogue import Dataset, Variant
from minedraft_core.experiments.grid import Cell, Session, gpus_of
from minedraft_core.experiments.jobs import jobs_of
from minedraft_core.experiments.store import Store
from minedraft_core.trace import RunHeader, trace_lines
from minedraft_core.types import DraftRecord, Job, LookaheadRecord, Mode, Record, RequestRecord

_DIGITS = 16


class Engine(Protocol):
    """An engine that runs, with nobody else asking it."""

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of the prompts, as a user's turn where the tokenizer has a chat template."""
        ...

    def random_prompts(self, count: int, length: int) -> list[list[int]]:
        """Random token ids, the same on every call."""
        ...

    def set_mode(self, order: ModeOrder) -> None:
        """Change mode and number of draft tokens."""
        ...

    def serve(self, jobs: Sequence[Job], load: int) -> tuple[list[list[int]], list[RequestRecord]]:
        """The tokens of each job and how long each took, `load` at a time."""
        ...

    def take_records(self, num_tokens: int) -> list[Record]:
        """The records since the last call, once their passes have delivered so many tokens."""
        ...


Start = Callable[[Session, PipelineConfig], AbstractContextManager[Engine]]
"""Starts a session's engine. Raises ConfigError where it is refused."""


@dataclass(frozen=True)
class Surroundings:
    """What all sessions of an experiment share: its names, its variant, the prompts of each dataset, its folder and the CPU cores.

    `describe` gives the provenance of an engine that starts now; `models` the target's and the drafter's folder or name.
    """

    experiment: str
    variant_name: str
    variant: Variant
    prompts: Mapping[str, Sequence[str]]
    store: Store
    cores: Cores
    describe: Callable[[], dict[str, Any]]
    models: Callable[[Session], tuple[str, str | None]]

    def settings(self, cell: Cell) -> dict[str, Any]:
        """What a cell's figures depend on."""
        return settings_of(self.variant, cell, self.prompts)

    def recording(self, target: str) -> Path:
        """Where it is kept what a target wrote for just these prompts under this variant."""
        return self.store.recording(target, _digest([self.prompts, self.variant.model_dump(mode="json")]))

    @property
    def on_cpu(self) -> bool:
        """Whether the variant is for CPUs."""
        return not self.variant.tensor_parallel


def settings_of(variant: Variant, cell: Cell, prompts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What a cell's figures depend on beside what its header says; traces made with other settings are not taken for it.

    Where the prompts of the cell's dataset are not at hand, nothing is said about their text.
    """
    texts = prompts.get(cell.dataset.name)
    return {
        **({} if texts is None else {"prompts_sha256": _digest(texts)}),
        "prompts": variant.prompts,
        "prompt_tokens": variant.prompt_tokens,
        "least_prompt_tokens": cell.dataset.min_tokens,
        "most_prompt_tokens": cell.dataset.max_tokens,
        "max_tokens": variant.max_tokens,
        "max_model_len": variant.max_model_len,
        "temperature": variant.temperature_for(cell.n),
        "warmup": variant.warmup,
        "warmup_once": variant.warmup_once,
        "runs": variant.runs,
        "seeded": variant.seeded,
        "tensor_parallel": variant.tensor_parallel,
        "flags": list(variant.flags),
        "note": variant.note,
    }


def refusal_of(session: Session, *, on_cpu: bool) -> str | None:
    """Why the product refuses a session, as far as that is known before anything is prepared for it; None where nothing is."""
    if session.draft is None:
        return None
    if session.mode == "native" and on_cpu:
        return "native: vLLM's own speculative decoding is compared on GPUs only"
    try:
        speculative = _speculative_of(session, session.draft.draft)
        if on_cpu:
            speculative.check_on_cpu()
        else:
            speculative.check_on_gpus()
    except ConfigError as error:
        return str(error)
    return None


def run_session(session: Session, around: Surroundings, start: Start, tell: Tell) -> str | None:
    """Run what is missing of a session. None, or the reason why it was refused, which is also written where reports find it."""
    store = around.store
    missing = [cell for cell in session.cells if not store.finished(cell, around.settings(cell))]
    recording = around.recording(session.target)
    record = session.recorded and not recording.exists()
    store.refusal(session).unlink(missing_ok=True)
    if not missing and not record:
        return None
    provenance = around.describe()
    try:
        tell(f"{session.name}: starting the engine")
        with start(session, pipeline_of(session, around)) as engine:
            if record:
                tell(f"{session.name}: recording what is replayed")
                _record(engine, session, around, recording)
            _run_cells(engine, session, missing, around, provenance, tell)
    except ConfigError as error:
        refused = [cell for cell in missing if not store.trace(cell).exists()]
        if not refused:
            raise
        with store.writing(store.refusal(session)) as file:
            file.writelines(msgspec.json.encode(header_of(cell, around, provenance, refused=str(error))) + b"\n" for cell in refused)
        return str(error)
    return None


def _run_cells(
    engine: Engine, session: Session, cells: Sequence[Cell], around: Surroundings, provenance: Mapping[str, Any], tell: Tell
) -> None:
    variant, warmup = around.variant, around.variant.warmup
    changes = len({(cell.mode, cell.k) for cell in session.cells}) > 1
    for cell in cells:
        jobs = jobs_of(engine, cell, variant, around.prompts)
        if changes:
            engine.set_mode(ModeOrder(Mode(cell.mode), cell.k))
        with around.store.writing(around.store.trace(cell)) as file:
            for index in range(warmup + variant.runs):
                tell(f"{cell.name}: run {index + 1} of {warmup + variant.runs}")
                _, lines = _serve(engine, jobs, cell.load)
                if index >= warmup:
                    header = header_of(cell, around, {**provenance, "requests": len(jobs)}, repeat=index - warmup)
                    file.write(msgspec.json.encode(header) + b"\n" + lines)
        if variant.warmup_once:
            warmup = 0


def _serve(engine: Engine, jobs: Sequence[Job], load: int) -> tuple[list[list[int]], bytes]:
    engine.take_records(0)
    outputs, requests = engine.serve(jobs, load)
    records = engine.take_records(sum(map(len, outputs)))
    # The answer to the last order of the run before comes with the first pass of this one.
    begin = min(request.start_us for request in requests)
    own = [record for record in records if not isinstance(record, DraftRecord | LookaheadRecord) or record.end_us >= begin]
    return outputs, trace_lines([*own, *requests])


def _record(engine: Engine, session: Session, around: Surroundings, path: Path) -> None:
    recorded: list[tuple[list[int], list[int]]] = []
    for dataset, n in session.recorded:
        jobs = jobs_of(engine, _cell_like(session, dataset, n), around.variant, around.prompts)
        outputs, _ = _serve(engine, jobs, session.max_num_seqs)
        recorded += zip((job.prompt for job in jobs), outputs, strict=True)
    with around.store.writing(path) as file:
        file.write(msgspec.json.encode(recorded))


def _cell_like(session: Session, dataset: Dataset, n: int) -> Cell:
    return Cell(session.target, None, "off", 0, 0, session.max_num_seqs, n, dataset, published=False)


def header_of(cell: Cell, around: Surroundings, provenance: Mapping[str, Any], *, repeat: int = 0, refused: str | None = None) -> RunHeader:
    """The head of a cell's run."""
    acceptance = None if cell.draft is None else cell.draft.acceptance
    how = "replayed" if around.on_cpu else "synthetic"
    return RunHeader(
        arm=cell.arm,
        target=cell.target,
        load=cell.load,
        draft=None if cell.draft is None else _named(cell.draft.draft, cell.draft.method),
        k=cell.k,
        extra=cell.extra,
        n=cell.n,
        dataset=cell.dataset.name,
        gpus=gpus_of(cell, around.variant.tensor_parallel),
        acceptance=None if acceptance is None else f"{how} p={acceptance:g}",
        published=cell.published,
        repeat=repeat,
        experiment=around.experiment,
        variant=around.variant_name,
        refused=refused,
        settings=around.settings(cell),
        provenance=dict(provenance),
    )


def _named(draft: str, method: str | None) -> str:
    return f"{draft} ({method})" if method else draft


def pipeline_of(session: Session, around: Surroundings) -> PipelineConfig:
    """The configuration of a session's engine. Raises ConfigError where the product refuses it."""
    cores = around.cores
    if session.draft is None:
        # Without a drafter its cores are the target's too.
        return PipelineConfig(target_cores=(*cores.target, *cores.drafter))
    if (reason := refusal_of(session, on_cpu=around.on_cpu)) is not None:
        raise ConfigError(reason)
    _, draft = around.models(session)
    speculative = _speculative_of(session, draft)
    return PipelineConfig(speculative=speculative, drafter=_drafter_of(session, around), target_cores=cores.target)


def _speculative_of(session: Session, draft: str | None) -> MineDraftConfig:
    assert session.draft is not None
    return MineDraftConfig.parse(
        {
            "method": session.draft.method,
            "model": draft,
            "num_speculative_tokens": session.k,
            "is_parallel": session.mode in ("parallel", "pearl"),
            "force_pearl": session.mode == "pearl",
            "tetris": session.extra > 0,
            "tetris_extra_proposals": session.extra,
        }
    )


def _drafter_of(session: Session, around: Surroundings) -> DrafterConfig:
    assert session.draft is not None
    acceptance = session.draft.acceptance
    if around.on_cpu:
        if acceptance is None:
            return DrafterConfig(cores=around.cores.drafter)
        return DrafterConfig(cores=around.cores.drafter, replay=str(around.recording(session.target)), replay_acceptance=acceptance)
    return DrafterConfig(
        device=SHARED_DEVICE if session.mode == "sequential" else None,
        synthetic_acceptance=acceptance,
    )


def _digest(content: object) -> str:
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:_DIGITS]
