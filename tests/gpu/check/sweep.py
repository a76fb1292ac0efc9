"""Draft lengths and batch sizes: parallel and sequential of one engine, which changes its mode between two runs."""

from __future__ import annotations

from dataclasses import asdict

from minedraft_core.bench.statistics import Run, steady_state, summarise
from minedraft_core.control import ModeOrder
from minedraft_core.types import Mode
from tests.gpu.check.basics import decode, engine
from tests.gpu.check.findings import attempt, figure, say

DUMMY = ("--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-prefix-caching")
TOKENS = 160


def expected(probability: float, k: int) -> float:
    """Mean acceptance length of k drafts where each is right with this probability if those before it are."""
    return sum(probability**place for place in range(k + 1))


def stage_sweep(arguments) -> None:
    target, draft = (f"{arguments.shapes}/{name}" for name in arguments.pair.split("+"))
    prompts = [[1000 + (7 * row + column) % 50000 for column in range(128)] for row in range(max(arguments.concurrency))]
    for k in arguments.depths:
        arguments.k = k
        length = expected(arguments.probability, k)
        for mode in arguments.modes:
            device = arguments.devices[0]
            with (
                attempt(f"{mode} k={k}"),
                engine(arguments, target, draft, mode, device, max(arguments.concurrency), *DUMMY, length=length) as running,
            ):
                if mode != "parallel":
                    _measure(arguments, running, prompts, mode)
                    continue
                # One start serves both modes, which differ by the order alone.
                for now in (Mode.PARALLEL, Mode.SEQUENTIAL):
                    running.set_mode(ModeOrder(now, k))
                    _measure(arguments, running, prompts, now)


def _measure(arguments, running, prompts, name: str) -> None:
    for concurrency in arguments.concurrency:
        decode(running, prompts[:concurrency], 16, concurrency)
        _, span = running.generate(prompts[:concurrency], TOKENS)
        steady = steady_state(running.take_records(concurrency * TOKENS), concurrency)
        if steady is None:
            say(False, f"{name} k={arguments.k} C={concurrency}: no steady state")
            continue
        found = summarise([Run(steady, TOKENS * concurrency / span.duration_us * 1e6)])
        say(None, f"{name} k={arguments.k} C={concurrency}: {found}")
        figure(mode=name, device=arguments.devices[0], concurrency=concurrency, pair=arguments.pair, k=arguments.k, **asdict(found))
