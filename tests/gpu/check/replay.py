"""The time of CUDA graphs on the current stream, after some replays that are not counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def replay(graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
    """One after the other."""
    for graph in graphs:
        graph.replay()


def replayed(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int, warmup: int) -> float:
    """Mean microseconds of a replay of all, those that follow each other being one measurement."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(warmup):
        replay(graphs)
    begin.record()
    for _ in range(repeats):
        replay(graphs)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats


def fastest(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int, warmup: int) -> float:
    """Microseconds of the fastest replay of all, which others on the same card have not interrupted."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for _ in range(warmup):
        replay(graphs)
    for begin, end in pairs:
        begin.record()
        replay(graphs)
        end.record()
    torch.cuda.synchronize()
    return min(begin.elapsed_time(end) for begin, end in pairs) * 1e3
