"""The time of a CUDA graph."""

from __future__ import annotations

import torch


def replayed(graph: torch.cuda.CUDAGraph, repeats: int, warmup: int) -> float:
    """Mean microseconds of a replay on the current stream, after some that are not counted."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(warmup):
        graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats
