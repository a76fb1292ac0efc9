"""The data files are the published experiments."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

from minedraft_core.config import ConfigError
from minedraft_core.experiments.catalogue import catalogue, read_experiment
from minedraft_core.experiments.grid import cells_of, sessions_of

NAMES = [
    *("experiment_1", "experiment_2_eagle", "experiment_2_llama", "experiment_3_n_llama", "experiment_3_n_qwen", "experiment_4_bs"),
    *("experiment_5_tetris_llama", "experiment_5_tetris_qwen", "experiment_6_qwen8b", "experiment_7_qwen235b", "experiment_8_nsys"),
]
DEFAULTS = tomllib.loads(files("minedraft_core.experiments").joinpath("data/defaults.toml").read_text())


def test_all_eight_experiments_are_there() -> None:
    known = catalogue()
    assert list(known) == NAMES
    assert {name.split("_")[1] for name in known} == {str(number) for number in range(1, 9)}


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_has_parallel_and_sequential_at_m_and_2m(name: str) -> None:
    for kind, variant in catalogue()[name].variants.items():
        modes = variant.modes if kind == "cpu" or not variant.profile else ("sequential", "parallel")
        cells = cells_of(variant, modes)
        for size in variant.batch:
            loads = {load for cell in cells if cell.mode == "sequential" and not cell.extra for load in [cell.load]}
            assert {size, 2 * size} <= loads
            assert any(cell.mode == "parallel" and cell.load == 2 * size and cell.published for cell in cells)


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_variant_is_small_and_needs_no_download(name: str) -> None:
    variant = catalogue()[name].variants["cpu"]
    assert variant.tensor_parallel == 0
    assert {pair.target for pair in variant.pairs} == {"embedded"}
    assert all(pair.draft == "embedded" or pair.draft.startswith("layers:") for pair in variant.pairs)
    requests = sum((variant.warmup + variant.runs) * variant.prompts * cell.n for cell in cells_of(variant))
    assert requests * variant.max_tokens < 60_000


@pytest.mark.parametrize("name", NAMES)
def test_the_synthetic_variant_has_no_weights_and_a_mean_acceptance(name: str) -> None:
    variant = catalogue()[name].variants["synthetic"]
    assert all(pair.target.startswith("shape:") and pair.acceptance is not None for pair in variant.pairs)
    assert variant.prompt_tokens is not None
    assert {"--load-format", "dummy"} <= set(variant.flags)
    assert variant.k == catalogue()[name].variants["paper"].k


def test_the_published_grid() -> None:
    paper = catalogue()["experiment_1"].variants["paper"]
    assert (paper.batch, paper.k, paper.extra, paper.runs, paper.prompts, paper.max_tokens) == (
        (16,),
        (1, 2, 3, 4, 5),
        (1, 2, 3),
        3,
        1000,
        256,
    )
    assert [pair.draft for pair in paper.pairs] == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B"]
    assert (paper.temperature_for(1), paper.temperature_for(2)) == (1.0, 0.8)
    assert {dataset.name: dataset.min_tokens for dataset in paper.datasets} == {"sharegpt": 256, "arena": 16, "spec_bench": 4, "tough": 16}
    assert catalogue()["experiment_4_bs"].variants["paper"].batch == (8, 16, 32, 64)
    assert catalogue()["experiment_8_nsys"].variants["paper"].profile


def test_a_fault_in_a_data_file_names_file_and_key() -> None:
    content = {"title": "x", "paper": {"pairs": [], "batch": [0]}, "synthetic": {"pairs": []}, "cpu": {"pairs": [], "colour": 1}}
    with pytest.raises(ConfigError, match=r"experiment_9\.toml: variants\.paper\.batch\.0: .*variants\.cpu\.colour"):
        read_experiment("experiment_9", content, DEFAULTS)


@pytest.mark.parametrize("name", NAMES)
def test_no_two_arms_share_a_trace(name: str) -> None:
    for variant in catalogue()[name].variants.values():
        for modes in ((), ("off", "sequential", "parallel", "pearl", "native")):
            cells = cells_of(variant, modes)
            sessions = sessions_of(cells, on_cpu=not variant.tensor_parallel)
            assert len({cell.name for cell in cells}) == len(cells)
            assert len({session.name for session in sessions}) == len(sessions)
