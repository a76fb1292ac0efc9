"""The time of a draft step alone: one drafter on one device, without a target, its graph replayed again and again."""

from __future__ import annotations

import gc
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import product

from minedraft_core.config import DrafterConfig, MineDraftConfig, PipelineConfig
from tests.gpu.check.findings import attempt, figure, say

REPEATS = 40
CONTEXT, PAGE, MAX_LEN = 256, 16, 2048
VARIANTS = (("none", "as_saved"), ("attention", "as_saved"), ("layers", "as_saved"), ("layers", "fp8"))
TILES = tuple(product((16, 32, 64), (64, 128, 256), (1, 2, 4), (4, 8), (3, 5)))
COPIES = 16  # of a matrix, so that none is found in the L2 cache


def stage_step(arguments) -> None:
    """Each way of running a draft step, by batch size; the kernels of one draft where a profiler can be had."""
    import torch

    name = arguments.pair.split("+")[1]
    config = _config(f"{arguments.shapes}/{name}", arguments.k, max(arguments.concurrency))
    for fused, weights in VARIANTS:
        with attempt(f"{fused} {weights}"):
            engine = _engine(config, DrafterConfig(fused=fused, weights=weights), arguments.k, max(arguments.concurrency))
            for rows in arguments.concurrency:
                took = _replayed(engine, rows) / arguments.k
                say(None, f"{name} {fused} {weights}, batch {rows}: {took:.0f} us a draft step")
                figure(model=name, fused=fused, weights=weights, batch=rows, step_us=took)
            for kernel, count, mean in _kernels(engine, arguments.concurrency[0]):
                say(None, f"  {count / arguments.k:6.1f} a step, {mean:6.1f} us each: {kernel[:90]}")
                figure(model=name, fused=fused, weights=weights, batch=arguments.concurrency[0], kernel=kernel, count=count, mean_us=mean)
            engine.close()
            del engine
        gc.collect()
        torch.cuda.empty_cache()


def _config(shape: str, k: int, most: int):
    """vLLM's configuration of a target and a drafter of the same shape, with dummy weights."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import AsyncEngineArgs

    from minedraft_core.vllm.args import draft_model_speculation

    speculative = MineDraftConfig(model=shape, num_speculative_tokens=k)
    config = AsyncEngineArgs(
        model=shape,
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=MAX_LEN,
        max_num_seqs=most,
        speculative_config=draft_model_speculation(PipelineConfig(speculative=speculative)),
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/rendezvous", 0, backend="nccl")
        initialize_model_parallel(1, 1)
    return config


def _engine(config, drafter: DrafterConfig, k: int, most: int):
    """A drafter with its graphs, and jobs of requests with `CONTEXT` tokens in its buffer."""
    import torch
    from vllm.config import set_current_vllm_config

    from minedraft_core.vllm.gpu.engine import DraftEngine, Shape
    from minedraft_core.vllm.gpu.kernels import HEADER
    from minedraft_core.vllm.gpu.methods import SeparateModel

    device = torch.device("cuda", 0)
    with set_current_vllm_config(config):
        model = SeparateModel().load(torch.nn.Identity(), config, device, drafter)
    assert model is not None
    columns = MAX_LEN // PAGE
    engine = DraftEngine(model, device, None, use_fp64=False)
    engine.allocate(Shape(most, k, columns, PAGE, MAX_LEN), 1 + most * (CONTEXT // PAGE + 1))
    pack = engine._pack
    pack[:, 0], pack[:, 1], pack[:, 2], pack[:, 3] = 11, 12, CONTEXT - 1 - k, 1
    held = CONTEXT // PAGE + 1
    pack[:, HEADER : HEADER + held] = 1 + torch.arange(most * held, dtype=torch.int32, device=device).view(most, held)
    before = pack.clone()
    engine.capture()
    pack.copy_(before)
    engine.settle()
    return engine


def _replayed(engine, rows: int) -> float:
    """Microseconds of one draft."""
    import torch

    graph = engine._graphs[engine.bucket(rows), False]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(engine._stream):
        for _ in range(5):
            graph.replay()
        begin.record()
        for _ in range(REPEATS):
            graph.replay()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / REPEATS


def _kernels(engine, rows: int) -> list[tuple[str, int, float]]:
    """Name, number and mean microseconds of the kernels of one draft, those that take longest first."""
    import torch

    graph = engine._graphs[engine.bucket(rows), False]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with torch.cuda.stream(engine._stream):
            graph.replay()
        engine.settle()
    times = defaultdict(list)
    for event in profile.events():
        times[event.name].append(event.time_range.elapsed_us())
    return sorted(((name, len(took), sum(took) / len(took)) for name, took in times.items()), key=lambda kernel: -kernel[1] * kernel[2])


@dataclass(frozen=True)
class Shaped:
    """One product of a layer: its name, weights [outputs, depth], and what surrounds it."""

    name: str
    outputs: int
    depth: int
    gated: bool
    normed: bool


def stage_tiles(arguments) -> None:
    """How the products of the drafter's layers are best cut: the fastest tiles for a batch, and the one that is chosen."""
    import json
    from pathlib import Path

    shape = json.loads(Path(arguments.shapes, arguments.pair.split("+")[1], "config.json").read_text())
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries = shape["num_attention_heads"] * head
    joined = queries + 2 * shape["num_key_value_heads"] * head
    for eight in (False, True):
        for shaped in (
            Shaped("qkv", joined, hidden, gated=False, normed=True),
            Shaped("output", hidden, queries, gated=False, normed=False),
            Shaped("gate and up", 2 * inner, hidden, gated=True, normed=True),
            Shaped("down", hidden, inner, gated=False, normed=False),
        ):
            with attempt(shaped.name):
                _tiles(shaped, arguments.concurrency[0], eight=eight)


def _tiles(shaped: Shaped, rows: int, *, eight: bool) -> None:
    import torch

    from minedraft_core.vllm.gpu.products import Matrix, Norm, Products, Tile, padded
    from minedraft_core.vllm.gpu.weights import eight_bits

    class Fixed(Products):
        """Products that are cut in one way."""

        def tile(self, rows, matrix, *, gated):
            return cut

    device = torch.device("cuda", 0)
    weight = torch.randn(shaped.outputs, shaped.depth, device=device).mul_(0.02).bfloat16()
    if eight:
        quantized, scales = eight_bits(weight)
        matrices = [Matrix(quantized.clone(), None, scales.flatten()) for _ in range(COPIES)]
    else:
        matrices = [Matrix(weight.clone()) for _ in range(COPIES)]
    values = torch.randn(rows, shaped.depth, device=device).bfloat16()
    norm = Norm(torch.ones(shaped.depth, device=device, dtype=torch.bfloat16), 1e-6) if shaped.normed else None
    residual = None if shaped.normed else torch.zeros(rows, shaped.outputs, device=device, dtype=torch.bfloat16)
    bytes_read = weight.numel() * (1 if eight else 2)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    width = shaped.outputs // (1 + shaped.gated)
    chosen = Products(sms, chained=True).tile(padded(rows), matrices[0], gated=shaped.gated)
    sensible = [
        Tile(*sizes) for sizes in TILES if sms // 2 <= sizes[2] * width // sizes[0] <= 4 * sms and shaped.depth % (sizes[1] * sizes[2]) == 0
    ]
    for cut in (chosen, *sensible):
        products = Fixed(sms, chained=True)
        workspace = products.workspace([(matrices[0], shaped.gated)], device)
        multiply = partial(products.multiply, values, workspace=workspace, norm=norm, residual=residual, gated=shaped.gated)
        try:
            multiply(matrices[0])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for matrix in matrices:
                    multiply(matrix)
        except Exception as error:  # noqa: BLE001 -- a tile may need more shared memory than there is
            say(None, f"  {cut}: {type(error).__name__}")
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        found.append((begin.elapsed_time(end) * 1e3 / 10 / COPIES, cut))
    for took, cut in [found[0], *sorted(found, key=lambda pair: pair[0])[:4]]:
        say(None, f"{shaped.name}{' fp8' if eight else ''}, {rows} rows: {took:.2f} us, {bytes_read / took / 1e6:.2f} TB/s with {cut}")
        figure(product=shaped.name, eight=eight, rows=rows, us=took, tile=str(cut), chosen=cut == chosen)
