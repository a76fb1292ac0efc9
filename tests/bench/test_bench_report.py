"""The table and the file, from figures written by hand."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from minedraft_core.bench.plan import arms_of
from minedraft_core.bench.report import DEFINITIONS, BenchmarkFile, Row, rows_of, table, versions
from minedraft_core.bench.statistics import Figures
from tests.bench.samples import CORES, plan

FIXED = (
    "mode target draft k concurrency tokens_per_second tokens_per_second_per_gpu acceptance_length drafted accepted "
    "verify_ms draft_ms gap_ms hidden_share predicted_ratio"
)
OFF = Figures(100.0, 90.0, (100.0,), 10, 10.0, None, 0.5, None, 0.3, None, None, None, None)
SEQUENTIAL = replace(OFF, tokens_per_second=80.0, verify_ms=24.0, draft_ms=12.0, gap_ms=13.0, hidden_share=0.0, acceptance_length=2.5)
PARALLEL = replace(SEQUENTIAL, tokens_per_second=104.0, verify_ms=14.0, draft_ms=8.0, gap_ms=0.7, hidden_share=0.9, drafted=40, accepted=15)
ARMS = arms_of(["off", "sequential", "parallel"], CORES)
FIGURES = dict(zip(ARMS, (OFF, OFF, SEQUENTIAL, PARALLEL), strict=True))


def rows(**changes: Any) -> list[Row]:
    made = plan(arms=ARMS, **changes)
    return rows_of(made, {(arm, count): figures for arm, figures in FIGURES.items() for count in made.concurrency})


def by_mode(concurrency: int, **changes: Any) -> dict[str, Row]:
    return {row.mode: row for row in rows(**changes) if row.concurrency == concurrency}


def test_the_prediction_is_from_both_rows_of_the_same_run() -> None:
    found = by_mode(8)
    assert found["parallel"].predicted_ratio == pytest.approx((24 + 12) / (2 * 14))
    assert found["parallel"].sequential_ratio == pytest.approx(104 / 80)
    assert found["sequential"].predicted_ratio is None


def test_tetris_is_compared_with_the_same_mode_without_it() -> None:
    arms = arms_of(["sequential", "sequential-tetris", "parallel-tetris"], CORES)
    figures = dict(zip(arms, (SEQUENTIAL, replace(SEQUENTIAL, acceptance_length=2.2), PARALLEL), strict=True))
    found = {row.mode: row for row in rows_of(plan(arms=arms), {(arm, 8): value for arm, value in figures.items()})}
    assert found["sequential-tetris"].accepted_ratio == pytest.approx(1.2 / 1.5)
    assert found["sequential"].accepted_ratio is None
    assert found["parallel-tetris"].accepted_ratio is None


def test_one_request_has_no_two_sides() -> None:
    assert by_mode(1)["parallel"].predicted_ratio is None


def test_plain_decoding_has_no_drafter() -> None:
    row = by_mode(8, acceptance=0.8)["off-all-cores"]
    assert (row.draft, row.k, row.drafter_cores, row.target_cores, row.acceptance) == (None, 0, (), (0, 1, 2), None)


def test_lengths_by_batch_are_compared_with_the_same_k_for_all_and_named_in_the_caption() -> None:
    arms = arms_of(["sequential-by-batch", "sequential", "parallel-by-batch"], CORES)
    figures = dict(zip(arms, (replace(SEQUENTIAL, tokens_per_second=100.0), SEQUENTIAL, PARALLEL), strict=True))
    made = plan(arms=arms, per_batch_size=((1, 4, 4), (5, 9, 1)))
    found = rows_of(made, {(arm, 8): value for arm, value in figures.items()})
    assert [row.sequential_ratio for row in found] == pytest.approx([100 / 80, 1, 104 / 80])
    assert [row.predicted_ratio for row in found] == [None] * 3
    assert "4 from 1 on, 1 from 5 on" in str(table(made, found).caption)


def test_a_replay_is_named_in_its_rows_and_in_the_caption() -> None:
    assert by_mode(8, acceptance=0.8)["parallel"].acceptance == "replayed p=0.8"
    assert by_mode(8)["parallel"].acceptance is None
    assert "replayed p=0.8" in str(table(plan(arms=ARMS, acceptance=0.8), rows(acceptance=0.8)).caption)


def test_the_file_has_the_fixed_keys(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    BenchmarkFile(device="cpu", gpus=0, versions=versions(), command="minedraft bench engine", definitions=DEFINITIONS, rows=rows()).write(
        file
    )
    content = msgspec.json.decode(file.read_bytes())
    assert list(content) == ["device", "gpus", "versions", "command", "definitions", "rows"]
    assert len(content["rows"]) == 8
    for row in content["rows"]:
        assert list(row)[: len(FIXED.split())] == FIXED.split()
        assert row["tokens_per_second_per_gpu"] is None
    assert {"cpu", "python", "vllm", "torch", "transformers"} <= content["versions"].keys()


def test_a_folder_is_shown_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    assert rows(target=str(folder))[0].target == "some-model"
    assert rows(target="owner/model")[0].target == "owner/model"


def test_the_table_shows_every_row_and_both_ratios() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(plan(arms=ARMS), rows()))
    text = console.export_text()
    parallel = [line for line in text.splitlines() if "parallel" in line]
    assert len(parallel) == 2
    assert [value for value in ("1.30", "1.29", "104.0") if value in parallel[1]] == ["1.30", "1.29", "104.0"]
    assert text.count("off-all-cores") >= 2
