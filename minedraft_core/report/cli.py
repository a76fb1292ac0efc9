"""`minedraft trace report`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from minedraft_core.config import ConfigError
from minedraft_core.errors import errors_in_one_line
from minedraft_core.report import tables
from minedraft_core.report.arms import MeasuredArm, measured
from minedraft_core.report.reading import read_traces
from minedraft_core.report.verdict import advice, choices

trace_app = typer.Typer(help="What a trace tells.", no_args_is_help=True)


@trace_app.callback()
def trace() -> None:
    """What a trace tells."""


@trace_app.command("report")
def trace_report(
    traces: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Traces of this product or of the original plugin.")],
    out: Annotated[Path, typer.Option(help="Folder that gets page, plots, CSV and notebook.")] = Path("report"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "MineDraft traces",
) -> None:
    """Make tables and plots of traces: throughput, latency, waits, passes, speculation, and which mode to use at which load."""
    with errors_in_one_line():
        check_extra()
        arms = measured(read_traces(traces))
        page = make_report(arms, traces, out, title)
    show(arms)
    typer.echo(f"report: {page}")


def check_extra() -> None:
    """Raise ConfigError where the plots' library is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib; `make setup` installs it, elsewhere pip install 'minedraft[report]'")


def make_report(arms: Sequence[MeasuredArm], traces: Sequence[Path], out: Path, title: str) -> Path:
    """Write the report; the path of its page."""
    # matplotlib takes a second to import.
    from minedraft_core.report.page import write_report

    return write_report(arms, traces, out, title)


def show(arms: Sequence[MeasuredArm]) -> None:
    """Print throughput, what was refused, and what to use at which load."""
    console = Console()
    console.width = max(console.width, _WIDTH)
    found = choices(arms)
    shown = [*tables.tables(arms)[:1], tables.refused_table(arms), tables.choice_table(found) if found else None]
    for table in filter(None, shown):
        grid = Table(title=table.title, title_justify="left", box=SIMPLE_HEAD)
        for head in table.heads:
            grid.add_column(head, overflow="fold")
        for row in table.rows:
            grid.add_row(*row)
        console.print(grid)
    for arm in arms:
        for remark in arm.remarks if arm.header.refused is None else ():
            console.print(f"{arm.trace.name}: {remark}", highlight=False, soft_wrap=True)
    for sentence in advice(found):
        console.print(sentence, highlight=False, soft_wrap=True)


_WIDTH = 150
