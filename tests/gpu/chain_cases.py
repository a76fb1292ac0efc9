"""Layers whose kernels begin before their predecessors have ended against the same ones in order, on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch

from minedraft_core.vllm.gpu.decode import DraftStep, Heads
from minedraft_core.vllm.gpu.layers import Layer, Layers
from minedraft_core.vllm.gpu.products import Matrix, Norm, Products
from minedraft_core.vllm.gpu.weights import eight_bits

PAGE, CONTEXT = 16, 200
REPLAYS = 200


def random_layers(device: str, dtype: torch.dtype, count: int, hidden: int, heads: Heads, num_reqs: int, *, eight: bool) -> Layers:
    """Layers with weights and KV of some requests at random."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    def matrix(outputs: int, depth: int) -> Matrix:
        weight = random(outputs, depth, scale=0.5 / depth**0.5)
        quantized, scales = eight_bits(weight)
        return Matrix(quantized, None, scales.flatten()) if eight else Matrix(weight)

    def layer() -> Layer:
        blocks = num_reqs * (CONTEXT // PAGE + 1) + 1
        cache = random(blocks, PAGE, heads.num_kv_heads, 2 * heads.head_size).transpose(1, 2)
        return Layer(
            before_attention=Norm(1 + random(hidden, scale=0.1), 1e-6),
            qkv=matrix((heads.num_heads + 2 * heads.num_kv_heads) * heads.head_size, hidden),
            norms=(1 + random(heads.head_size, scale=0.1), 1 + random(heads.head_size, scale=0.1)),
            head_eps=1e-6,
            attention=SimpleNamespace(kv_cache=cache, impl=SimpleNamespace(scale=heads.head_size**-0.5)),
            output=matrix(hidden, heads.num_heads * heads.head_size),
            before_mlp=Norm(1 + random(hidden, scale=0.1), 1e-6),
            gate_up=matrix(6 * hidden, hidden),
            down=matrix(hidden, 3 * hidden),
        )

    phases = torch.rand(CONTEXT + 2, heads.head_size // 2, generator=generator) * 6
    angles = torch.cat([phases.cos(), phases.sin()], dim=1).to(device, dtype)
    return Layers(tuple(layer() for _ in range(count)), angles, Products(heads.multiprocessors, chained=False), None)


def step_of(
    layers: Layers, heads: Heads, num_reqs: int, queries: int
) -> tuple[Callable[[Layers, torch.Tensor], torch.Tensor], torch.Tensor]:
    """What runs layers on a stream, and a stream: some new tokens of each request behind its context."""
    device, dtype = layers.angles.device, layers.angles.dtype
    columns = CONTEXT // PAGE + 1
    table = 1 + torch.arange(num_reqs * columns, dtype=torch.int32, device=device).view(num_reqs, columns)
    positions = (CONTEXT - queries + torch.arange(queries, device=device)).repeat(num_reqs, 1)
    slots = (table.gather(1, positions // PAGE).long() * PAGE + positions % PAGE).flatten()
    seq_lens = torch.full((num_reqs,), CONTEXT, dtype=torch.int32, device=device)
    step = DraftStep(heads, heads.scratch(num_reqs, device), table, seq_lens, slots)
    workspace = layers.workspace()
    states = torch.randn(num_reqs * queries, layers.layers[0].down.weight.shape[0], generator=torch.Generator().manual_seed(1))

    def run(which: Layers, stream: torch.Tensor) -> torch.Tensor:
        return which.run(stream, positions.flatten(), step, workspace)

    return run, states.to(device, dtype)


def compare_chained(count: int = 12, hidden: int = 2048) -> None:
    """On a card with Hopper's launches: a graph of chained layers, replayed many times, gives bit for bit what layers in order give."""
    heads = Heads(16, 8, 128, torch.cuda.get_device_properties(0).multi_processor_count)
    for eight, queries in ((False, 1), (False, 2), (True, 1), (True, 2)):
        ordered = random_layers("cuda", torch.bfloat16, count, hidden, heads, 8, eight=eight)
        chained = replace(ordered, products=replace(ordered.products, chained=True))
        run, start = step_of(ordered, heads, 8, queries)
        expected = run(ordered, start.clone())
        assert expected.isfinite().all()
        stream = start.clone()
        run(chained, stream)
        torch.testing.assert_close(stream, expected, rtol=0, atol=0)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run(chained, stream)
        for _ in range(REPLAYS):
            stream.copy_(start)
            graph.replay()
            torch.testing.assert_close(stream, expected, rtol=0, atol=0)
