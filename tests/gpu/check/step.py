"""The time of a draft step alone: one drafter on one device, without a target, its graphs replayed again and again."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

from minedraft_core.config import DrafterConfig, MineDraftConfig, PipelineConfig
from tests.gpu.check.findings import attempt, figure, say
from tests.gpu.check.replay import replay, replayed

REPEATS = 40
CONTEXT, PAGE, MAX_LEN = 256, 16, 2048
VARIANTS = (("none", "as_saved"), ("attention", "as_saved"), ("layers", "as_saved"), ("layers", "fp8"))


def stage_step(arguments) -> None:
    """Each way of running a draft step, by batch size; the kernels of one draft where a profiler can be had."""
    name = arguments.pair.split("+")[1]
    config = configuration(f"{arguments.shapes}/{name}", arguments.k, max(arguments.concurrency))
    engines = {}
    for fused, weights in VARIANTS:
        with attempt(f"{fused} {weights}"):
            engine = allocated(config, DrafterConfig(fused=fused, weights=weights), arguments.k, max(arguments.concurrency))
            _capture(engine)
            for rows in arguments.concurrency:
                took = _replayed(engine, rows) / arguments.k
                say(None, f"{name} {fused} {weights}, batch {rows}: {took:.0f} us a draft step")
                figure(model=name, fused=fused, weights=weights, batch=rows, step_us=took)
            engines[fused, weights] = engine
    # What follows a profiler may be slower for it, so it comes last.
    for (fused, weights), engine in engines.items():
        with attempt(f"kernels of {fused} {weights}"):
            for kernel, count, mean in _kernels(engine, arguments.concurrency[0]):
                say(None, f"{fused} {weights}: {count / arguments.k:6.1f} a step, {mean:6.1f} us each: {kernel[:90]}")
                figure(model=name, fused=fused, weights=weights, batch=arguments.concurrency[0], kernel=kernel, count=count, mean_us=mean)
        engine.close()


def configuration(shape: str, k: int, most: int):
    """vLLM's configuration of a target and a drafter of the same shape, with dummy weights."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs

    from minedraft_core.vllm.args import draft_model_speculation
    from tests.gpu.alone import stand_alone

    speculative = MineDraftConfig(model=shape, num_speculative_tokens=k)
    config = AsyncEngineArgs(
        model=shape,
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=MAX_LEN,
        max_num_seqs=most,
        speculative_config=draft_model_speculation(PipelineConfig(speculative=speculative)),
    ).create_engine_config()
    # Two stages may run in one process.
    if not torch.distributed.is_initialized():
        stand_alone(config, Path(tempfile.mkdtemp()), "nccl")
    return config


def allocated(config, drafter: DrafterConfig, k: int, most: int):
    """A drafter without graphs yet, and jobs of requests with `CONTEXT` tokens in its buffer."""
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
    return engine


def _capture(engine) -> None:
    """Record the graphs of an engine; its jobs stay what they are."""
    jobs = engine._pack.clone()
    engine.capture()
    engine._pack.copy_(jobs)
    engine.settle()


def _replayed(engine, rows: int) -> float:
    """Microseconds of one draft."""
    import torch

    with torch.cuda.stream(engine._stream):
        return replayed(engine._graphs[engine.bucket(rows), False], REPEATS, 5)


def _kernels(engine, rows: int) -> list[tuple[str, int, float]]:
    """Name, number and mean microseconds of the kernels of one draft, those that take longest first."""
    import torch

    graphs = engine._graphs[engine.bucket(rows), False]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with torch.cuda.stream(engine._stream):
            replay(graphs)
        engine.settle()
    times = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.time_range.elapsed_us())
    return sorted(((name, len(took), sum(took) / len(took)) for name, took in times.items()), key=lambda kernel: -kernel[1] * kernel[2])
