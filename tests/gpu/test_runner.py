"""How many KV blocks each rank asks for, with the drafter on a device of its own and on one of the target's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minedraft_core.config import ConfigError
from minedraft_core.vllm.gpu import runner
from minedraft_core.vllm.gpu.layout import Reserve, place
from minedraft_core.vllm.gpu.runner import _DRAFTER_RESERVE, MineDraftModelRunner

GIB = 1 << 30
BLOCK, BYTES, DRAFT_BYTES_PER_TOKEN = 16, 1 << 20, 1 << 14  # a block takes 1 MiB of the target's cache and a quarter of the drafter's
CARD, UTILIZATION = 100 * GIB, 0.9
NOTHING = Reserve()


@pytest.fixture(autouse=True)
def plain_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def config_of(_config, _groups, memory):
        blocks = memory // BYTES
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))
        return SimpleNamespace(num_blocks=blocks, kv_cache_tensors=[SimpleNamespace(size=blocks * BYTES)], kv_cache_groups=[group])

    monkeypatch.setattr(runner, "get_kv_cache_groups", lambda _config, _specs: None)
    monkeypatch.setattr(runner, "get_kv_cache_config_from_groups", config_of)
    monkeypatch.setattr(runner, "_announce", lambda _line: None)


def blocks(
    monkeypatch: pytest.MonkeyPatch,
    available: int,
    *,
    size: int = 1,
    rank: int = 0,
    drafter: int | None = None,
    fixed: bool = False,
    free: int = 80 * GIB,
    reserve: Reserve = NOTHING,
) -> int:
    """Blocks of one rank of a target over `size` devices; `free` bytes are left on the drafter's device."""
    asked: list[int] = []

    def mem_get_info(device):
        asked.append(device)
        return free, CARD

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    layout = place(size, drafter, size + 1, drafts=True)
    made = SimpleNamespace(
        _layout=layout,
        device=torch.device("cuda", rank),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=available if fixed else None, gpu_memory_utilization=UTILIZATION),
        _leads=rank == 0,
        _reserve=reserve,
        _pipeline=object(),
        vllm_config=None,
        get_kv_cache_spec=dict,
        _full_attention_group=lambda _config: 0,
        _bytes_per_token=DRAFT_BYTES_PER_TOKEN,
        max_model_len=4096,
    )
    found = MineDraftModelRunner.share_memory(made, available)
    assert set(asked) <= {layout.drafter}
    return found // BYTES


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_device_of_its_own_limits_the_blocks_by_what_vllm_may_use_there(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    assert blocks(monkeypatch, 8 * GIB, size=size) == 8 * 1024, "the drafter has room for more"
    room = int(UTILIZATION * CARD) - 20 * GIB - _DRAFTER_RESERVE
    assert blocks(monkeypatch, 400 * GIB, size=size) == room // (BLOCK * DRAFT_BYTES_PER_TOKEN)
    assert [blocks(monkeypatch, 8 * GIB, size=size, rank=rank) for rank in range(1, size)] == [8 * 1024] * (size - 1)


@pytest.mark.parametrize("drafter", [0, 1])
def test_on_a_device_of_the_target_both_caches_come_out_of_its_share(monkeypatch: pytest.MonkeyPatch, drafter: int) -> None:
    both = BYTES + BLOCK * DRAFT_BYTES_PER_TOKEN
    found = [blocks(monkeypatch, 8 * GIB, size=2, rank=rank, drafter=drafter) for rank in (0, 1)]
    assert found[drafter] == (8 * GIB - _DRAFTER_RESERVE) // both
    assert found[1 - drafter] == 8 * 1024


def test_a_cache_of_fixed_size_is_kept_where_the_drafters_fits_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"drafter": 0}, {"size": 2, "drafter": 1, "rank": 1}, {"size": 4}):
        assert blocks(monkeypatch, 8 * GIB, fixed=True, **options) == 8 * 1024, options


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"size": 4}, 10 * GIB),
        ({"drafter": 0}, 2 * GIB),
        ({"size": 2, "drafter": 1, "rank": 1}, 2 * GIB),
        ({"reserve": Reserve(GIB, 2 * GIB)}, 8 * GIB),
    ],
)
def test_a_cache_of_fixed_size_shrinks_to_what_is_free_for_the_drafter(monkeypatch: pytest.MonkeyPatch, options, left: int) -> None:
    """Of 10 GiB that are free the target's own 8 are taken where it is on the same device."""
    available = 8 * GIB if "drafter" in options else 800 * GIB
    found = blocks(monkeypatch, available, fixed=True, free=10 * GIB, **options)
    assert found == (left - _DRAFTER_RESERVE) // (BLOCK * DRAFT_BYTES_PER_TOKEN)


def test_hidden_states_of_jobs_lie_beside_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Reserve(target=GIB)
    assert [blocks(monkeypatch, 8 * GIB, size=4, rank=rank, reserve=reserve) // 1024 for rank in range(4)] == [7, 8, 8, 8]
    assert blocks(monkeypatch, 8 * GIB, fixed=True, reserve=reserve) == 8 * 1024


def test_too_little_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="fit 0 blocks of 16 tokens, one request of 4096 tokens needs 257"):
        blocks(monkeypatch, 8 * GIB, drafter=0, fixed=True, free=9 * GIB)
