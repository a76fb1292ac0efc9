"""Which mode to use at which load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minedraft_core.report.arms import MeasuredArm, measured
from minedraft_core.report.reading import read_traces
from minedraft_core.report.verdict import Choice, advice, choices
from tests.report.samples import header, run_lines, write


def arm(tmp_path: Path, mode: str, load: int, speeds: tuple[float, ...], **changes: Any) -> MeasuredArm:
    values = {"arm": mode, "load": load, **({"draft": None, "k": 0} if mode == "off" else {}), **changes}
    path = tmp_path / f"{mode}-{load}-{values.get('k', 2)}-{values.get('draft')}-{values.get('acceptance')}.jsonl".replace("/", "-")
    runs = [run_lines(1000.0 * index, speed=speed) for index, speed in enumerate(speeds)]
    (found,) = measured(read_traces([write(path, header(**values), *runs)]))
    return found


def only(found: list[Choice]) -> Choice:
    (choice,) = found
    return choice


def test_the_fastest_mode_at_equal_load_is_chosen(tmp_path: Path) -> None:
    arms = [
        arm(tmp_path, "off", 4, (1.0, 1.0)),
        arm(tmp_path, "sequential", 4, (1.4, 1.5)),
        arm(tmp_path, "parallel", 4, (2.0, 2.2)),
        arm(tmp_path, "parallel", 8, (9.0,)),
    ]
    at_four, at_eight = choices(arms)
    assert at_four.words == "parallel k=2"
    assert round(at_four.over_off or 0, 2) == 2.1
    assert round(at_four.over_next or 0, 2) == 1.45
    assert at_eight.words == "parallel k=2 (nothing to compare with)"


def test_of_a_mode_the_best_k_counts(tmp_path: Path) -> None:
    arms = [arm(tmp_path, "sequential", 4, (1.0,), k=1), arm(tmp_path, "sequential", 4, (3.0,), k=3), arm(tmp_path, "off", 4, (2.0,))]
    assert only(choices(arms)).words == "sequential k=3"


def test_modes_whose_runs_overlap_are_one_answer(tmp_path: Path) -> None:
    speeds = {"off": (1.0, 1.3, 1.0), "sequential": (1.2, 1.2, 1.2), "parallel": (0.5, 0.6, 0.5)}
    arms = [arm(tmp_path, mode, 4, runs) for mode, runs in speeds.items()]
    choice = only(choices(arms))
    assert choice.words == "sequential k=2 or off: no clear difference"
    assert advice([choice]) == ["target with draft (questions), by running requests: off or sequential at 4."]


def test_drafters_judged_in_different_ways_are_not_mixed(tmp_path: Path) -> None:
    arms = [
        arm(tmp_path, "off", 4, (1.0,)),
        arm(tmp_path, "sequential", 4, (0.9,)),
        arm(tmp_path, "sequential", 4, (3.0,), acceptance="replayed p=0.8"),
    ]
    found = {choice.acceptance: choice.words for choice in choices(arms)}
    assert found == {"": "off", "replayed p=0.8": "sequential k=2"}


def test_the_best_per_gpu_can_be_another(tmp_path: Path) -> None:
    arms = [arm(tmp_path, "sequential", 4, (1.0,), gpus=4), arm(tmp_path, "parallel", 4, (1.2,), gpus=5)]
    choice = only(choices(arms))
    assert choice.best.header.arm == "parallel"
    assert choice.best_per_gpu is not None
    assert choice.best_per_gpu.header.arm == "sequential"


def test_neighbouring_loads_with_one_answer_are_said_together(tmp_path: Path) -> None:
    arms = [arm(tmp_path, "off", load, (1.0,)) for load in (1, 2, 8)]
    arms += [arm(tmp_path, "sequential", load, (speed,)) for load, speed in ((1, 2.0), (2, 1.5), (8, 0.5))]
    assert advice(choices(arms)) == ["target with draft (questions), by running requests: sequential at 1, 2; off at 8."]


def test_runs_that_differ_are_remarked(tmp_path: Path) -> None:
    assert arm(tmp_path, "off", 4, (1.0, 1.2)).remarks == ()
    assert "2.0 times as fast" in arm(tmp_path, "off", 4, (1.0, 2.0)).remarks[0]


def test_an_arm_that_brought_no_token_is_remarked_and_never_chosen(tmp_path: Path) -> None:
    silent = run_lines().replace(b'"gen_len":9', b'"gen_len":0').replace(b'"gen_len":8', b'"gen_len":0')
    (trace,) = read_traces([write(tmp_path / "silent.jsonl", header(arm="off", draft=None, k=0), silent, run_lines(500))])
    (failed,) = read_traces([write(tmp_path / "failed.jsonl", header(arm="parallel"), silent)])
    arms = measured([trace, failed])
    assert all("a run brought no token: its throughput is 0" in one.remarks for one in arms)
    chosen = only(choices([*measured([failed]), arm(tmp_path, "sequential", 2, (1.0,))]))
    assert chosen.words == "sequential k=2 (nothing to compare with)"
    assert chosen.over_off is None
