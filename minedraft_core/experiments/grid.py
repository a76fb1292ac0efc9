"""From a variant to its cells and to the engines that run them. Pure functions.

A cell is one arm at one load on one set of prompts; it has a trace of its own. Cells that one engine can run, one after the other, share a
session: on CPU mode and number of draft tokens change between two cells, on GPUs both are the engine's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from minedraft_core.experiments.catalogue import Dataset, ModeName, Pair, Variant

_PUBLISHED = ("sequential", "parallel", "pearl")
_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True)
class Cell:
    """One arm at one load. `draft` is None for plain decoding; `k` and `extra` are then 0."""

    target: str
    draft: Pair | None
    mode: ModeName
    k: int
    extra: int
    load: int
    n: int
    dataset: Dataset
    published: bool

    @property
    def arm(self) -> str:
        """The mode, and whether TETRIS chooses."""
        return f"{self.mode}-tetris" if self.extra else self.mode

    @property
    def name(self) -> str:
        """What its files are called."""
        # Plain decoding is measured for each target; a drafter belongs to one.
        models = safe(self.target) if self.draft is None else f"{_pair_name(self.draft)}-k{self.k}{f'+{self.extra}' if self.extra else ''}"
        return f"{safe(self.dataset.name)}-n{self.n}-c{self.load:03}-{self.arm}-{models}"


@dataclass(frozen=True)
class Session:
    """One engine and the cells that it runs in turn. It is started with `mode`, `k` and `extra` and room for `max_num_seqs` requests.

    `recorded` are prompts and samples whose output the drafters of other sessions replay.
    """

    target: str
    draft: Pair | None
    mode: ModeName
    k: int
    extra: int
    max_num_seqs: int
    cells: tuple[Cell, ...]
    recorded: tuple[tuple[Dataset, int], ...] = ()

    @property
    def name(self) -> str:
        """What its files are called."""
        if self.draft is None:
            return f"{self.mode}-{safe(self.target)}"
        modes = "-".join(dict.fromkeys(cell.mode for cell in self.cells))
        return f"{modes}-{_pair_name(self.draft)}-k{self.k}{f'+{self.extra}' if self.extra else ''}-c{self.max_num_seqs}"


def safe(name: str) -> str:
    """A name for files: letters, digits, dots and hyphens, a folder's or repository's last part."""
    return _UNSAFE.sub("-", name.rstrip("/").rpartition("/")[2])


def _pair_name(pair: Pair) -> str:
    method = f"{safe(pair.method)}-" if pair.method else ""
    return f"{method}{safe(pair.draft)}"


def cells_of(variant: Variant, modes: Sequence[ModeName] = (), datasets: Sequence[str] = ()) -> list[Cell]:
    """All cells, or those of the named modes and datasets; a named mode that the variant leaves out is run too."""
    chosen = [dataset for dataset in variant.datasets if not datasets or dataset.name in datasets]
    cells: list[Cell] = []
    for dataset, n, mode in product(chosen, variant.n, modes or variant.modes):
        if mode == "off":
            cells += [
                Cell(target, None, mode, 0, 0, load, n, dataset, published=False)
                for target in dict.fromkeys(pair.target for pair in variant.pairs)
                for load in _loads(variant.batch, variant.loads)
            ]
            continue
        for pair, k, extra in product(variant.pairs, variant.k, _extras(variant, mode)):
            loads = _loads(variant.batch, variant.tetris_loads if extra else variant.loads)
            cells += [Cell(pair.target, pair, mode, k, extra, load, n, dataset, _is_published(variant, mode, load)) for load in loads]
    return cells


def _extras(variant: Variant, mode: ModeName) -> tuple[int, ...]:
    return (0,) if mode == "native" else (0, *variant.extra)


def _loads(batch: Sequence[int], factors: Sequence[int]) -> list[int]:
    return sorted({size * factor for size in batch for factor in factors})


def _is_published(variant: Variant, mode: ModeName, load: int) -> bool:
    """Whether the published experiment ran this many requests at once in this mode: two sides of m, or one."""
    return mode in _PUBLISHED and load in {size * (2 if mode == "parallel" else 1) for size in variant.batch}


def sessions_of(cells: Sequence[Cell], *, on_cpu: bool) -> list[Session]:
    """The engines for these cells, those whose output is replayed first."""
    key = _cpu_key if on_cpu else _gpu_key
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    recorded = _recorded(cells) if on_cpu else {}
    sessions = [_session(members, recorded) for members in groups.values()]
    for target in recorded.keys() - {session.target for session in sessions if session.recorded}:
        most = max(cell.load for cell in cells if cell.target == target)
        sessions.append(Session(target, None, "off", 0, 0, most, (), recorded[target]))
    return sorted(sessions, key=lambda session: not session.recorded)


def _recorded(cells: Sequence[Cell]) -> dict[str, tuple[tuple[Dataset, int], ...]]:
    """For each target the prompts and samples that some drafter replays."""
    found: dict[str, dict[tuple[Dataset, int], None]] = {}
    for cell in cells:
        if cell.draft is not None and cell.draft.acceptance is not None:
            found.setdefault(cell.target, {})[cell.dataset, cell.n] = None
    return {target: tuple(keys) for target, keys in found.items()}


def _session(cells: Sequence[Cell], recorded: dict[str, tuple[tuple[Dataset, int], ...]]) -> Session:
    first = cells[0]
    return Session(
        target=first.target,
        draft=first.draft,
        mode=first.mode,
        k=max(cell.k for cell in cells),
        extra=first.extra,
        max_num_seqs=max(cell.load for cell in cells),
        cells=tuple(cells),
        recorded=recorded.get(first.target, ()) if first.draft is None else (),
    )


def _cpu_key(cell: Cell) -> tuple[object, ...]:
    if cell.draft is None or cell.mode == "native":
        return (cell.target, cell.mode, cell.draft, cell.k)
    # TETRIS fills its batch up to the room of the engine.
    return (cell.target, cell.draft, cell.extra, cell.load if cell.extra else 0)


def _gpu_key(cell: Cell) -> tuple[object, ...]:
    return (cell.target, cell.draft, cell.mode, cell.k, cell.extra, cell.load if cell.extra else 0)


def gpus_of(cell: Cell, tensor_parallel: int) -> int:
    """CUDA devices that a cell uses: the drafter has its own in parallel and pearl, the target's first otherwise. 0 on CPU."""
    own = cell.mode in ("parallel", "pearl")
    return tensor_parallel + own if tensor_parallel else 0
