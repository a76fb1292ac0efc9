"""Which CUDA graph of the target a decode pass gets, by tokens a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from minedraft_core.config import MineDraftConfig, PipelineConfig
from minedraft_core.vllm.gpu.graphs import DecodeGraphs, token_counts
from minedraft_core.vllm.gpu.runner import MineDraftModelRunner

SIZES, MAX_REQUESTS, K = (1, 2, 4, 8, 16, 24, 32, 40), 8, 4


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: alone)
    monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))


def made(
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    *,
    varlen: bool = False,
    loras: list[int] | None = None,
    own_lengths: list[tuple[int, int, int]] | None = None,
) -> ModelCudaGraphManager:
    """vLLM's graphs; `own_lengths`: its own draft lengths by batch size."""
    speculative = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: own_lengths is not None, num_speculative_tokens_per_batch_size=own_lengths
    )
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQUESTS),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=list(SIZES), max_cudagraph_capture_size=max(SIZES)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=speculative,
        num_speculative_tokens=K,
    )
    return ModelCudaGraphManager(config, "cpu", mode, K + 1, loras, varlen)


def graph(manager: ModelCudaGraphManager, requests: int, query_len: int | None, tokens: int, loras: int = 0) -> BatchExecutionDescriptor:
    """What a pass runs in, as if all had been captured."""
    manager._graphs_captured = True
    return manager.dispatch(requests, tokens, query_len, loras, query_len)


@pytest.mark.parametrize("requests", range(1, MAX_REQUESTS + 1))
@pytest.mark.parametrize("query_len", range(1, K + 2))
def test_decode_passes_of_every_length_run_in_a_whole_graph_that_holds_them(requests: int, query_len: int) -> None:
    found = graph(DecodeGraphs(made(), range(1, K + 2)), requests, query_len, requests * query_len)
    assert (found.cg_mode, found.uniform_token_count) == (CUDAGraphMode.FULL, query_len)
    assert requests <= found.num_reqs <= MAX_REQUESTS
    assert found.num_tokens == found.num_reqs * query_len
    assert found.num_tokens == min(
        count for count in token_counts(query_len, SIZES, MAX_REQUESTS, max(SIZES)) if count >= requests * query_len
    )


def test_lengths_that_were_not_asked_for_and_mixed_passes_run_in_pieces_as_before() -> None:
    before, after = made(), DecodeGraphs(made(), [1])
    assert graph(after, 3, 1, 3).cg_mode == CUDAGraphMode.FULL
    assert graph(before, 3, 1, 3).cg_mode == CUDAGraphMode.PIECEWISE
    for requests, query_len, tokens in ((3, 2, 6), (3, None, 7), (8, None, 40), (3, K + 1, 15), (8, K + 1, 40)):
        assert graph(after, requests, query_len, tokens) == graph(before, requests, query_len, tokens)


def test_every_graph_is_captured_once_the_largest_first() -> None:
    captured = DecodeGraphs(made(loras=[0, 2]), range(1, K + 2))._capture_descs[CUDAGraphMode.FULL]
    assert len(set(captured)) == len(captured)
    assert [shape.num_tokens for shape in captured] == sorted((shape.num_tokens for shape in captured), reverse=True)
    assert captured[0].num_tokens == max(SIZES)
    assert {shape.num_active_loras for shape in captured if shape.uniform_token_count == 1} == {0, 2}


def test_lengths_that_vllm_captures_itself_are_not_captured_again() -> None:
    rows = [(1, 2, K), (3, 4, 2), (5, MAX_REQUESTS, 0)]
    captured = DecodeGraphs(made(own_lengths=rows), {1, 4, K + 1})._capture_descs[CUDAGraphMode.FULL]
    assert len(set(captured)) == len(captured)
    assert {shape.uniform_token_count for shape in captured} == {1, 3, 4, K + 1}


def test_passes_with_adapters_have_graphs_of_their_own() -> None:
    manager = DecodeGraphs(made(loras=[0, 2]), [1])
    assert graph(manager, 5, 1, 5, loras=1) == BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, 1, num_active_loras=2)


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_nothing_is_added_where_vllm_makes_no_difference_by_length(mode: CUDAGraphMode) -> None:
    before, after = made(mode), DecodeGraphs(made(mode), range(1, K + 2))
    assert (after._capture_descs, after._candidates) == (before._capture_descs, before._candidates)


def test_graphs_of_tetris_take_passes_of_any_length_already() -> None:
    before, after = made(varlen=True), DecodeGraphs(made(varlen=True), range(1, K + 2))
    assert (after._capture_descs, after._candidates) == (before._capture_descs, before._candidates)
    assert graph(after, 3, 1, 3).cg_mode == CUDAGraphMode.FULL


@pytest.mark.parametrize(
    ("address", "rows", "lengths"),
    [
        (None, None, {1, 5}),
        ("ipc://orders", None, {1, 2, 3, 4, 5}),
        (None, ((1, 8, 4), (9, 20, 2), (21, 64, 1)), {1, 2, 3, 5}),
    ],
)
def test_there_are_graphs_for_the_lengths_that_can_come(address: str | None, rows: Any, lengths: set[int]) -> None:
    speculative = MineDraftConfig(model="d", num_speculative_tokens=K, num_speculative_tokens_per_batch_size=rows)
    runner: Any = SimpleNamespace(_config=PipelineConfig(speculative=speculative, control_address=address), decode_query_len=K + 1)
    assert MineDraftModelRunner._query_lens(runner) == lengths


def test_long_drafts_have_graphs_for_the_lengths_that_orders_often_name() -> None:
    speculative = MineDraftConfig(model="d", num_speculative_tokens=64, num_speculative_tokens_per_batch_size=((1, 8, 64), (9, 64, 20)))
    runner: Any = SimpleNamespace(_config=PipelineConfig(speculative=speculative, control_address="ipc://orders"), decode_query_len=65)
    assert MineDraftModelRunner._query_lens(runner) == {*range(1, 10), 21, 65}
