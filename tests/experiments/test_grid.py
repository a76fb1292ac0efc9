"""Which arms a variant has, and which engines run them."""

from __future__ import annotations

from minedraft_core.experiments.grid import cells_of, gpus_of, safe, sessions_of
from tests.experiments.samples import variant


def test_every_mode_runs_at_m_and_2m_and_the_published_loads_are_marked() -> None:
    cells = cells_of(variant(k=[3]))
    assert [(cell.arm, cell.load, cell.k, cell.published) for cell in cells] == [
        ("off", 2, 0, False),
        ("off", 4, 0, False),
        ("sequential", 2, 3, True),
        ("sequential", 4, 3, False),
        ("parallel", 2, 3, False),
        ("parallel", 4, 3, True),
    ]
    assert len({cell.name for cell in cells}) == len(cells)


def test_loads_that_several_batches_share_are_run_once() -> None:
    assert [cell.load for cell in cells_of(variant(batch=[1, 2, 4]), ["off"])] == [1, 2, 4, 8]


def test_plain_decoding_is_run_once_for_a_target_with_several_drafters() -> None:
    pairs = [{"target": "target", "draft": "one"}, {"target": "target", "draft": "two"}]
    assert len(cells_of(variant(pairs=pairs), ["off"])) == 2


def test_tetris_is_run_with_every_k_at_its_loads() -> None:
    cells = [cell for cell in cells_of(variant(extra=[1, 2]), ["parallel"]) if cell.extra]
    assert [(cell.arm, cell.k, cell.extra, cell.load) for cell in cells] == [
        ("parallel-tetris", 1, 1, 4),
        ("parallel-tetris", 1, 2, 4),
        ("parallel-tetris", 3, 1, 4),
        ("parallel-tetris", 3, 2, 4),
    ]


def test_a_mode_that_the_variant_leaves_out_is_run_where_it_is_named() -> None:
    assert {cell.mode for cell in cells_of(variant(), ["native"])} == {"native"}


def test_on_cpu_modes_and_draft_tokens_share_an_engine_and_tetris_has_its_own() -> None:
    sessions = sessions_of(cells_of(variant(extra=[2])), on_cpu=True)
    assert [(session.mode, session.k, session.extra, session.max_num_seqs, len(session.cells)) for session in sessions] == [
        ("off", 0, 0, 4, 2),
        ("sequential", 3, 0, 4, 8),
        ("sequential", 3, 2, 4, 4),
    ]
    assert len({session.name for session in sessions}) == 3


def test_on_gpus_every_mode_and_number_of_draft_tokens_has_an_engine() -> None:
    sessions = sessions_of(cells_of(variant(tensor_parallel=4)), on_cpu=False)
    assert [(session.mode, session.k, len(session.cells)) for session in sessions] == [
        ("off", 0, 2),
        ("sequential", 1, 2),
        ("sequential", 3, 2),
        ("parallel", 1, 2),
        ("parallel", 3, 2),
    ]


def test_the_drafter_counts_where_it_has_a_gpu_of_its_own() -> None:
    gpus = {cell.mode: gpus_of(cell, 4) for cell in cells_of(variant(), ["off", "sequential", "parallel", "pearl", "native"])}
    assert gpus == {"off": 4, "sequential": 4, "parallel": 5, "pearl": 5, "native": 4}


def test_what_is_replayed_is_recorded_first_even_where_plain_decoding_is_not_asked_for() -> None:
    replaying = variant(pairs=[{"target": "target", "draft": "draft", "acceptance": 0.8}], n=[1, 2])
    for modes in ((), ("parallel",)):
        first, *others = sessions_of(cells_of(replaying, modes), on_cpu=True)
        assert first.mode == "off"
        assert [(dataset.name, n) for dataset, n in first.recorded] == [("questions", 1), ("questions", 2)]
        assert len(first.cells) == (0 if modes else 4)
        assert all(not session.recorded for session in others)


def test_names_are_safe_for_files() -> None:
    assert safe("maker/Model-1.5B (x)") == "Model-1.5B-x-"
    assert safe("shape:qwen3-32b") == "shape-qwen3-32b"
