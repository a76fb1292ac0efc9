from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from loadtest.compare import plot
from loadtest.figures import summarise
from loadtest.plan import Limits
from loadtest.results import make_results, read_results
from server.cli import app
from tests.loadtest.test_figures import sample
from tests.loadtest.test_prompts import plan


def write(path: Path, label: str, first: float) -> Path:
    limits = Limits(ttft_ms=200)
    figures = summarise([sample(first=first + 0.01 * number, gaps={900: 9}) for number in range(20)], limits, gpus=5)
    make_results(plan(label=label, limits=limits), "http://x", 4, figures, ["too slow"], overloaded=False).write(path)
    return path


def compare(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["loadtest", "compare", *arguments])
    return result.exit_code, result.output


def test_runs_side_by_side(tmp_path: Path) -> None:
    files = [str(write(tmp_path / "a.json", "plain <b>", 0.1)), str(write(tmp_path / "b.json", "parallel", 0.3))]
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    assert compare(*files, "--html", str(page), "--png", str(picture)) == (0, "")
    text = page.read_text()
    assert "plain &lt;b&gt;" in text
    assert "parallel" in text
    assert "<td>195.0</td>" in text  # the median of 100, 110, ... 290 ms
    assert "<td>395.0</td>" in text
    assert "too slow" in text
    assert "data:image/png;base64," in text
    with Image.open(io.BytesIO(picture.read_bytes())) as image:
        assert image.format == "PNG"
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 10


def test_the_curves_say_which_run_they_are_of(tmp_path: Path) -> None:
    runs = [read_results(write(tmp_path / "a.json", "plain", 0.1)), read_results(write(tmp_path / "b.json", "parallel", 0.3))]
    bars, curves = [], []
    for axes in plot(runs).axes:
        legend = axes.get_legend()
        assert legend is not None
        (curves if axes.lines else bars).append([text.get_text() for text in legend.get_texts()])
    assert bars == [["all", "good"]] * 2
    assert curves == [["plain", "parallel"]] * 4


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (None, ["--html", "x.html"], "cannot be read"),
        ("{}", ["--html", "x.html"], "holds no results of a load test"),
        ("{}", [], "name what to write"),
    ],
)
def test_faults_in_one_message(content: str | None, flags: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    code, output = compare(str(path), *flags)
    assert code == 2
    assert message in output
    assert output.count("\n") == 1


def test_every_file_that_is_written_is_one_of_its_own(tmp_path: Path) -> None:
    results = write(tmp_path / "a.json", "plain", 0.1)
    before = results.read_bytes()
    for flags in (["--html", "page", "--png", "./page"], ["--png", str(results)]):
        code, output = compare(str(results), *flags)
        assert (code, "--html and --png need files of their own" in output) == (2, True)
    assert results.read_bytes() == before


def test_what_is_missing_is_named_and_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["loadtest", "run", "--headless"])
    assert result.exit_code == 2
    assert "locust is not installed" in result.output
    assert "`make setup` installs it" in result.output
    assert "minedraft[loadtest]" in result.output


def test_the_command_line_loads_neither_locust_nor_gevent() -> None:
    code = "import sys, server.cli; sys.exit(any(name in sys.modules for name in ('locust', 'gevent', 'matplotlib', 'duckdb')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_help_names_our_flags_and_where_locusts_are() -> None:
    result = CliRunner().invoke(app, ["loadtest", "run", "--help"])
    assert result.exit_code == 0
    assert "--slo-ttft-ms" in result.output
    assert "python -m locust --help" in result.output


def test_a_label_is_text_and_no_formula(tmp_path: Path) -> None:
    results = write(tmp_path / "a.json", "5 $\\frac$", 0.1)
    assert compare(str(results), "--png", str(tmp_path / "a.png")) == (0, "")
