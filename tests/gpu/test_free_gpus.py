"""NVML's answers on a machine that has GPUs."""

from __future__ import annotations

import pytest
import torch

from minedraft_core.gpus import describe_gpus, read_use


@pytest.mark.gpu
def test_every_gpu_is_read_and_described() -> None:
    uses = read_use()
    assert len(uses) >= torch.cuda.device_count()
    assert all(0.0 <= use.memory_percent <= 100.0 and 0.0 <= use.utilisation_percent <= 100.0 for use in uses)
    described = describe_gpus()
    assert len(described["devices"]) == len(uses)
    assert all(device["sm_max_mhz"] > 0 for device in described["devices"])
