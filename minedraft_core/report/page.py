"""The report as files: one HTML page that needs nothing else, its plots as PNG and SVG, CSV, and a notebook."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from minedraft_core.report import tables
from minedraft_core.report.arms import MeasuredArm
from minedraft_core.report.plots import Plot, plots, save
from minedraft_core.report.verdict import advice, choices

_PACKAGE = "minedraft_core.report"
_NOTEBOOK = "notebook.ipynb"
_FILES_CELL = "files"
_REQUEST_FIELDS = ("start_us", "scheduled_us", "first_token_us", "end_us", "prompt_len", "gen_len", "finish_reason")
_STEP_FIELDS = (
    *("start_us", "end_us", "mode", "side", "is_prompt_run", "is_parallelised", "batched_requests", "preempted_requests"),
    *("batched_token_num", "proposed_len", "verify_len", "accepted_num", "generated_num", "measured_draft_time"),
    *("measured_target_time", "measured_overhead_time", "gap_us", "drafter_wait_us"),
)


def write_report(arms: Sequence[MeasuredArm], paths: Sequence[Path], folder: Path, title: str) -> Path:
    """Write the whole report of these arms, read from `paths`, into a folder; the path of its page. Raises OSError where it cannot be."""
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    drawn = plots(arms)
    images = [(plot, save(plot, folder / "plots")) for plot in drawn]
    page = folder / "index.html"
    page.write_text(render(arms, [(plot, svg.read_text()) for plot, (_, svg) in images], title), encoding="utf-8")
    write_csv(arms, folder)
    (folder / _NOTEBOOK).write_text(notebook(paths), encoding="utf-8")
    return page


def render(arms: Sequence[MeasuredArm], drawn: Sequence[tuple[Plot, str]], title: str) -> str:
    """The page as HTML; each plot comes with its SVG."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(_PACKAGE).joinpath("page.html").read_text(encoding="utf-8"))
    found = choices(arms)
    return template.render(
        title=title,
        common=tables.common(arms),
        provenance=_provenance(arms),
        advice=advice(found),
        choice=tables.choice_table(found) if found else None,
        refused=tables.refused_table(arms),
        plots=[(plot, _inline(svg, plot.name)) for plot, svg in drawn],
        tables=tables.tables(arms),
        remarks=[(arm.trace.name, remark) for arm in arms if arm.header.refused is None for remark in arm.remarks],
        definitions=tables.definitions(),
    )


def write_csv(arms: Sequence[MeasuredArm], folder: Path) -> None:
    """Write `arms.csv` with every column of the tables, `requests.csv` and `steps.csv` with the lines of the traces."""
    ran = [arm for arm in arms if arm.header.refused is None]
    rows = ([arm.trace.name, *(column.value(arm) for column in tables.ALL)] for arm in ran)
    _csv(folder / "arms.csv", ["file", *(column.name for column in tables.ALL)], rows)
    _csv(folder / "requests.csv", ["file", "run", *_REQUEST_FIELDS], _lines(ran, "requests", _REQUEST_FIELDS))
    _csv(folder / "steps.csv", ["file", "run", *_STEP_FIELDS], _lines(ran, "steps", _STEP_FIELDS))


def notebook(paths: Sequence[Path]) -> str:
    """The notebook that comes with the package, with these files named in it."""
    content = json.loads(files(_PACKAGE).joinpath(_NOTEBOOK).read_text(encoding="utf-8"))
    cell = next(cell for cell in content["cells"] if cell["id"] == _FILES_CELL)
    names = ",\n".join(f"    {str(path.resolve())!r}" for path in paths)
    cell["source"] = f"files = [\n{names},\n]".splitlines(keepends=True)
    return json.dumps(content, indent=1) + "\n"


def _lines(arms: Iterable[MeasuredArm], kind: str, fields: Sequence[str]) -> Iterable[list[Any]]:
    for arm in arms:
        for number, run in enumerate(arm.trace.runs):
            for line in getattr(run, kind):
                yield [arm.trace.name, number, *(getattr(line, name) for name in fields)]


def _csv(path: Path, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(heads)
        writer.writerows(rows)


def _inline(svg: str, name: str) -> str:
    """The svg element alone, its ids made its own: several share the page."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', element)
    return re.sub(r'(url\(#|xlink:href="#)', rf"\g<1>{name}-", element)


def _provenance(arms: Sequence[MeasuredArm]) -> list[tuple[str, str]]:
    """What the runs were made with; several values of one thing are all shown."""
    found: dict[str, dict[str, None]] = {}
    for arm in arms:
        for key, value in (*arm.header.settings.items(), *arm.header.provenance.items()):
            shown = value if isinstance(value, str) else json.dumps(value)
            found.setdefault(key, {})[shown] = None
    return [(key, " | ".join(values)) for key, values in found.items() if len(values) <= _MOST_VALUES]


_MOST_VALUES = 4
