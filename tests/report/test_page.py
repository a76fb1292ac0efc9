"""The report's files, made by the command."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from minedraft_core.report.cli import trace_app
from minedraft_core.types import Mode
from tests.report.samples import header, original, run_lines, write

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("traces")
    found = []
    for load in (2, 4):
        found.append(write(folder / f"off-{load}.jsonl", header(arm="off", draft=None, k=0, load=load, gpus=4), run_lines(mode=Mode.OFF)))
        for arm, mode in (("sequential", Mode.SEQUENTIAL), ("parallel", Mode.PARALLEL)):
            head = header(arm=arm, load=load, gpus=5, provenance={"commit": "<b>1234"})
            found.append(write(folder / f"{arm}-{load}.jsonl", head, run_lines(mode=mode, speed=1.5), run_lines(900, mode=mode, speed=1.6)))
    found.append(write(folder / "eagle.jsonl", header(arm="parallel", refused="EAGLE <drafters> are not in this version")))
    return found


@pytest.fixture(scope="module")
def report(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    result = RUNNER.invoke(trace_app, ["report", *map(str, files), "--out", str(out), "--title", "Two <modes>"])
    assert result.exit_code == 0, result.output
    assert "refused: EAGLE <drafters> are not in this version" in result.output
    assert "by running requests: parallel or sequential at 2, 4." in result.output
    return out


def test_the_page_has_everything_and_needs_nothing(report: Path) -> None:
    page = (report / "index.html").read_text()
    assert "<title>Two &lt;modes&gt;</title>" in page
    assert "refused: EAGLE &lt;drafters&gt; are not in this version" in page
    assert "&lt;b&gt;1234" in page
    for word in (
        "Throughput",
        "Request latency",
        "Time to first token",
        "Wait before",
        "Step time",
        "Verification success",
        "position",
        "Overlap",
        "batch",
    ):
        assert word in page
    assert page.count("<svg") == 10
    assert not re.search(r'(src|href)="(https?:)?//', page), "nothing is fetched"
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', page))
    assert used <= set(ids)


def test_each_plot_is_a_png_and_an_svg(report: Path) -> None:
    names = {path.stem for path in (report / "plots").iterdir()}
    assert names == {
        *("throughput", "throughput-per-gpu", "latency", "ttft", "wait", "step", "success", "positions", "lanes", "batch"),
    }
    for name in names:
        assert (report / "plots" / f"{name}.svg").read_text().startswith("<?xml")
        with Image.open(report / "plots" / f"{name}.png") as image:
            colours = image.convert("RGB").getcolors(1 << 20)
        assert colours is not None
        assert len(colours) > 10, f"{name} is drawn"


def test_csv_files_hold_the_same_figures(report: Path) -> None:
    with (report / "arms.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == ["off", "off", "parallel k=2", "sequential k=2", "parallel k=2", "sequential k=2"]
    sequential = next(row for row in rows if row["file"] == "sequential-2")
    assert float(sequential["tok/s"]) == pytest.approx(170 * 1.55, rel=1e-4)
    assert float(sequential["VSR"]) == 0.75
    with (report / "requests.csv").open() as file:
        assert sum(row["file"] == "sequential-2" for row in csv.DictReader(file)) == 4
    with (report / "steps.csv").open() as file:
        assert sum(row["file"] == "off-2" for row in csv.DictReader(file)) == 4


def test_the_notebook_runs_and_has_no_output(report: Path) -> None:
    content = json.loads((report / "notebook.ipynb").read_text())
    assert content["nbformat"] == 4
    names: dict[str, object] = {}
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    assert len(names["files"]) == len(names["arms"]) == 7
    assert names["rows"][0]["tok/s"] == pytest.approx(170.0)
    assert isinstance(names["drawn"]["throughput"], Figure)
    assert names["found"][0].best.header.arm in ("parallel", "sequential")


def test_a_report_of_an_original_trace(tmp_path: Path) -> None:
    result = RUNNER.invoke(trace_app, ["report", str(original(tmp_path / "trace.jsonl")), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "acceptance by position: its steps do not list their drafts" in result.output
    assert not (tmp_path / "out" / "plots" / "positions.png").exists()
    assert (tmp_path / "out" / "plots" / "batch.png").exists()


def test_names_are_text_and_no_formulas(tmp_path: Path) -> None:
    trace = write(tmp_path / "arm.jsonl", header(target="a$\\frac$", draft="b$\\nope$", dataset="c$d$"), run_lines())
    result = RUNNER.invoke(trace_app, ["report", str(trace), "--out", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output


def test_a_file_that_is_no_trace_is_one_message_and_code_2(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("hello\n")
    result = RUNNER.invoke(trace_app, ["report", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.output.startswith("error: line 1 of")
    assert not (tmp_path / "out").exists()


def test_plots_without_their_library_are_one_message_and_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = RUNNER.invoke(trace_app, ["report", str(original(tmp_path / "trace.jsonl")), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.output.startswith("error: plots need matplotlib")
    assert "`make setup` installs it" in result.output
    assert not (tmp_path / "out").exists()


def test_a_trace_that_does_not_tell_its_load_has_plots_too(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", header(load=0), run_lines())
    result = RUNNER.invoke(trace_app, ["report", str(path), "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
