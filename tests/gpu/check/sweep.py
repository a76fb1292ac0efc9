"""Draft lengths and batch sizes: one engine, which changes its mode and k between two runs.

With fewer drafts than the engine was started for the target's passes run in piecewise CUDA graphs.
"""

from __future__ import annotations

from dataclasses import asdict

from minedraft_core.bench.statistics import Run, steady_state, summarise
from minedraft_core.control import ModeOrder
from minedraft_core.types import Mode
from tests.gpu.check.basics import decode, engine
from tests.gpu.check.findings import attempt, figure, say

DUMMY = ("--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-prefix-caching")
TOKENS = 160


def stage_sweep(arguments) -> None:
    target, draft = (f"{arguments.shapes}/{name}" for name in arguments.pair.split("+"))
    prompts = [[1000 + (7 * row + column) % 50000 for column in range(128)] for row in range(max(arguments.concurrency))]
    arguments.k, device = max(arguments.depths), arguments.devices[0]
    with (
        attempt(arguments.pair),
        engine(
            arguments, target, draft, "parallel", device, max(arguments.concurrency), *DUMMY, acceptance=arguments.probability
        ) as running,
    ):
        for mode in map(Mode, (name for name in arguments.modes if name != "native")):
            for k in sorted(arguments.depths) if mode is not Mode.OFF else (0,):
                running.set_mode(ModeOrder(mode, k))
                with attempt(f"{mode} k={k}"):
                    _measure(arguments, running, prompts, mode, k)


def _measure(arguments, running, prompts, mode: Mode, k: int) -> None:
    for concurrency in arguments.concurrency:
        decode(running, prompts[:concurrency], 16, concurrency)
        _, span = running.generate(prompts[:concurrency], TOKENS)
        steady = steady_state(running.take_records(concurrency * TOKENS), concurrency)
        if steady is None:
            say(False, f"{mode} k={k} C={concurrency}: no steady state")
            continue
        found = summarise([Run(steady, TOKENS * concurrency / span.duration_us * 1e6)])
        say(None, f"{mode} k={k} C={concurrency}: {found}")
        figure(mode=mode, device=arguments.devices[0], concurrency=concurrency, pair=arguments.pair, k=k, **asdict(found))
