"""Which device runs what, and how many blocks fit."""

from __future__ import annotations

import pytest

from minedraft_core.config import ConfigError
from minedraft_core.vllm.gpu.layout import Budget, Layout, check_blocks, check_fit, common_blocks, place


@pytest.mark.parametrize(
    ("tensor_parallel", "named", "expected", "shared"),
    [
        (1, None, Layout((0,), 1), False),
        (1, 0, Layout((0,), 0), True),
        (2, None, Layout((0, 1), 2), False),
        (2, 1, Layout((0, 1), 1), True),
    ],
)
def test_the_drafter_gets_the_next_device_or_the_one_named(tensor_parallel: int, named: int | None, expected: Layout, shared: bool) -> None:
    layout = place(tensor_parallel, named, 4, drafts=True)
    assert layout == expected
    assert layout.shared is shared
    assert layout.num_devices == tensor_parallel + (not shared)
    assert f"drafter on cuda:{expected.drafter}" in layout.describe()


def test_plain_decoding_has_no_drafter() -> None:
    assert place(2, None, 2, drafts=False) == Layout((0, 1), None)


@pytest.mark.parametrize(
    ("devices", "named", "advice"),
    [(1, None, "--drafter-device 0 it shares"), (2, None, "--drafter-device 0 it shares"), (1, 3, "from 0 to 0")],
)
def test_a_missing_device_is_refused_with_what_to_do(devices: int, named: int | None, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        place(devices, named, devices, drafts=True)


def test_five_devices_hold_a_target_over_four_and_its_drafter() -> None:
    assert place(4, None, 5, drafts=True) == Layout((0, 1, 2, 3), 4)
    with pytest.raises(ConfigError, match=r"cuda:4, but this process sees 4"):
        place(4, None, 4, drafts=True)


def test_blocks_follow_the_smaller_device_or_share_one() -> None:
    target, drafter = Budget(1000, 10), Budget(90, 3)
    assert common_blocks(target, drafter, shared=False) == 30
    assert common_blocks(target, Budget(900, 3), shared=False) == 100
    assert common_blocks(target, drafter, shared=True) == 1000 // 13
    assert common_blocks(target, Budget(-5, 3), shared=False) == 0


def test_caches_too_small_for_one_request_are_refused_with_numbers() -> None:
    check_blocks(9, 16, 128, 1)
    with pytest.raises(ConfigError, match="fit 8 blocks of 16 tokens") as caught:
        check_blocks(8, 16, 128, 1)
    assert "--max-model-len to 112" in str(caught.value)


def test_a_cache_that_does_not_fit_is_refused_with_numbers() -> None:
    check_fit(1 << 30, 1 << 30, 7, 1)
    with pytest.raises(ConfigError, match=r"7 blocks and needs 2.00 GiB on cuda:1, where 1.00 GiB"):
        check_fit(2 << 30, 1 << 30, 7, 1)
