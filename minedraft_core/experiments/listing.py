"""What experiments there are and what one of them would run, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from minedraft_core.experiments.catalogue import Experiment, VariantName
from minedraft_core.experiments.grid import Cell, Session, cells_of, gpus_of, sessions_of
from minedraft_core.experiments.runner import refusal_of, settings_of
from minedraft_core.experiments.store import Store

_WIDTH = 150


def show_list(known: Mapping[str, Experiment]) -> None:
    """Print name, title and size of each experiment."""
    table = Table(box=SIMPLE_HEAD)
    for head in ("experiment", "what it compares", "arms and engines: paper", "cpu"):
        table.add_column(head, overflow="fold")
    for experiment in known.values():
        sizes = []
        for name in ("paper", "cpu"):
            variant = experiment.variants[name]
            cells = cells_of(variant)
            sizes.append(f"{len(cells)}, {len(sessions_of(cells, on_cpu=not variant.tensor_parallel))}")
        table.add_row(experiment.name, experiment.title, *sizes)
    _wide().print(table)


def show_plan(experiment: Experiment, name: VariantName, cells: Sequence[Cell], sessions: Sequence[Session], store: Store) -> bool:
    """Print what a variant runs, on which engines, what of it is finished and what is refused; whether any arm is not refused.

    Raises ConfigError for a trace of other settings.
    """
    variant = experiment.variants[name]
    console = _wide()
    console.print(f"{experiment.name} ({name}): {experiment.title}", highlight=False)
    if variant.note:
        console.print(variant.note, highlight=False)
    requests = variant.prompts if variant.prompt_tokens is None else f"{variant.prompts} random"
    warmup = f"{variant.warmup} run(s) to warm up{' each engine' if variant.warmup_once else ''}"
    console.print(
        f"{len(cells)} arms on {len(sessions)} engines; {warmup}, {variant.runs} measured, up to {requests} prompts, "
        f"{variant.max_tokens} tokens a request; flags: {' '.join(variant.flags)}",
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD)
    for head in ("engine", "target", "draft", "arm", "load", "GPUs", "published", "state"):
        table.add_column(head, overflow="fold")
    refusals = {session.name: refusal_of(session, on_cpu=not variant.tensor_parallel) for session in sessions}
    states = []
    for session in sessions:
        if not session.cells:
            table.add_row(session.name, session.target, "", "recording of what is replayed", str(session.max_num_seqs), "", "", "")
        for cell in session.cells:
            state = "refused" if refusals[session.name] else "to run"
            if store.finished(cell, settings_of(variant, cell, {})):
                state = "finished"
            states.append(state)
            drafts = f" k={cell.k}{f'+{cell.extra}' if cell.extra else ''}" if cell.k else ""
            draft = "" if cell.draft is None else cell.draft.draft
            gpus = str(gpus_of(cell, variant.tensor_parallel) or "")
            arm = f"{cell.arm}{drafts}, {cell.dataset.name}, n={cell.n}"
            table.add_row(session.name, cell.target, draft, arm, str(cell.load), gpus, "yes" if cell.published else "", state)
    console.print(table)
    for reason in dict.fromkeys(filter(None, refusals.values())):
        console.print(f"refused: {reason}", markup=False, highlight=False, soft_wrap=True)
    return any(state != "refused" for state in states)


def _wide() -> Console:
    console = Console()
    console.width = max(console.width, _WIDTH)
    return console
