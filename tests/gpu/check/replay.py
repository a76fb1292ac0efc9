"""The time of a CUDA graph on the current stream, after some replays that are not counted."""

from __future__ import annotations

import torch


def replayed(graph: torch.cuda.CUDAGraph, repeats: int, warmup: int) -> float:
    """Mean microseconds of a replay, those that follow each other being one measurement."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(warmup):
        graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats


def fastest(graph: torch.cuda.CUDAGraph, repeats: int, warmup: int) -> float:
    """Microseconds of the fastest replay, which others on the same card have not interrupted."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for _ in range(warmup):
        graph.replay()
    for begin, end in pairs:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return min(begin.elapsed_time(end) for begin, end in pairs) * 1e3
