"""Minutes of mixed load on little KV memory, with clients that leave and modes that change: all ends as asked, nothing grows or slows."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import suppress
from statistics import median

from minedraft_core.bench.prompts import read_prompts
from minedraft_core.control import ModeOrder
from minedraft_core.types import DrafterRecord, DraftRecord, Mode, StepRecord
from minedraft_core.vllm.args import runs_on_cpu
from tests.gpu.check.asking import Ask, answer
from tests.gpu.check.basics import TIGHT, drafted, engine, quick, summary
from tests.gpu.check.findings import attempt, figure, query, say

CONCURRENCY = 24
PERIOD = 20.0  # seconds between orders
EDGE = 60.0  # seconds at the beginning and the end that are compared
SLOWER = 1.15  # of a median, at most
GROWTH_MB = 150  # of the engine's memory on the host in the second half, at most; this process grows with the records it keeps


def stage_soak(arguments) -> None:
    for mode in arguments.soaked:
        extra = (*quick(), *(TIGHT[:2] if runs_on_cpu() else TIGHT))
        target, draft, device = arguments.target, arguments.draft, arguments.devices[0]
        with attempt(mode), engine(arguments, target, draft, mode, device, CONCURRENCY, *extra, max_model_len=1024) as running:
            running._runner.run(_soaked(running, arguments, mode))


async def _soaked(running, arguments, mode: str) -> None:
    began = time.monotonic()
    end = began + 60 * arguments.minutes
    state = {"asked": 0, "aborted": 0, "wrong": []}
    prompts = running.tokenize(read_prompts())
    workers = [asyncio.create_task(_client(running, prompts, number, end, state)) for number in range(CONCURRENCY + 8)]
    changes = asyncio.create_task(_orders(running, mode, arguments.k, end))
    await asyncio.sleep((end - began) / 2)
    halfway = _memory()
    await asyncio.gather(*workers)
    (given, refused), after = await changes, _memory()
    state["wrong"] += refused
    records = list(running._records)
    say(
        not state["wrong"],
        f"{mode}: {state['asked']} requests, {state['aborted']} aborted, {given} orders; wrong: {state['wrong'][:5]}; {summary(records)}",
    )
    down = [record for record in records if isinstance(record, DrafterRecord) and not record.up]
    preempted = sum(record.preempted_requests for record in records if isinstance(record, StepRecord))
    say(drafted(records) and preempted > 0, f"{mode}: {preempted} preemptions, drafter failures {[record.message for record in down]}")
    grown = after["engine_mb"] - halfway["engine_mb"]
    say(grown <= GROWTH_MB, f"{mode}: memory {halfway} halfway, {after} at the end, with {len(records)} records")
    say(after["cards_mb"] == halfway["cards_mb"] or None, f"{mode}: the cards' memory halfway and at the end")
    figure(
        mode=mode,
        minutes=arguments.minutes,
        halfway=halfway,
        after=after,
        asked=state["asked"],
        aborted=state["aborted"],
        orders=given,
        preempted=preempted,
        wrong=state["wrong"],
    )
    _drift(mode, records)


async def _client(running, prompts, number: int, end: float, state: dict) -> None:
    """Asks one thing after the other until the end."""
    choose = random.Random(number)
    while time.monotonic() < end:
        prompt = choose.choice(prompts)[: choose.randint(1, 400)] * choose.choice((1, 1, 1, 2))
        tokens = choose.randint(1, 300)
        params = {"max_tokens": tokens, "ignore_eos": True, "temperature": choose.choice((0.0, 0.0, 0.7, 1.0))}
        if choose.random() < 0.3:
            params["seed"] = choose.randint(0, 1000)
        if params["temperature"] and choose.random() < 0.15:
            params["n"] = 2
        abort_after = choose.randint(1, tokens) if choose.random() < 0.15 else None
        state["asked"] += 1
        try:
            output = await answer(running, Ask(prompt[:700], params, abort_after))
        except Exception as error:  # noqa: BLE001 -- the others go on
            state["wrong"].append((tokens, params, repr(error)))
            return
        if output is None:
            state["aborted"] += 1
        elif abort_after is None:
            lengths = [(len(choice.token_ids), choice.finish_reason) for choice in output.outputs]
            if lengths != [(tokens, "length")] * params.get("n", 1):
                state["wrong"].append((tokens, lengths))


async def _orders(running, mode: str, k: int, end: float) -> tuple[int, list[str]]:
    """Every fourth of a period the mode that the engine was started in gives way to another one, then comes back.

    How many orders were given, and what was wrong with one, which is the last then.
    """
    given = 0
    others = [ModeOrder(Mode.SEQUENTIAL, k), ModeOrder(Mode.PARALLEL, max(1, k - 1)), ModeOrder(Mode.OFF, 0)]
    try:
        while (left := end - time.monotonic()) > EDGE / 4:
            await asyncio.sleep(min(PERIOD * 0.75, left / 2))
            await asyncio.to_thread(running._control.set_mode, others[given // 2 % len(others)])
            await asyncio.sleep(min(PERIOD * 0.25, left / 4))
            await asyncio.to_thread(running._control.set_mode, ModeOrder(Mode(mode), k))
            given += 2
    except Exception as error:  # noqa: BLE001 -- the requests go on
        return given, [repr(error)]
    return given, []


def _memory() -> dict:
    """Megabytes of the engine's processes and of this one, and what is used of each card."""
    import psutil

    own, engine_bytes = psutil.Process(os.getpid()), 0
    for process in own.children(recursive=True):
        # A compiler may be gone by now.
        with suppress(psutil.NoSuchProcess):
            engine_bytes += process.memory_info().rss
    return {"engine_mb": engine_bytes >> 20, "own_mb": own.memory_info().rss >> 20, "cards_mb": query("memory.used")}


def _drift(mode: str, records) -> None:
    """V and D of passes of at least a few requests in the engine's own mode, at the beginning and at the end."""
    steps = [
        record
        for record in records
        if isinstance(record, StepRecord) and record.mode is Mode(mode) and not record.is_prompt_run and record.batched_requests >= 4
    ]
    jobs = [record for record in records if isinstance(record, DraftRecord) and record.batched_requests >= 4]
    for name, kind in (("V", steps), ("D", jobs)):
        if not kind:
            say(False, f"{mode}: no {name} to compare")
            continue
        edge = min(EDGE * 1e6, (kind[-1].end_us - kind[0].start_us) / 3)
        first = median(one.end_us - one.start_us for one in kind if one.start_us <= kind[0].start_us + edge)
        last = median(one.end_us - one.start_us for one in kind if one.start_us >= kind[-1].start_us - edge)
        say(last <= SLOWER * first, f"{mode}: {name} {first / 1000:.3f} ms at the beginning, {last / 1000:.3f} ms at the end")
        figure(mode=mode, name=name, first_ms=first / 1000, last_ms=last / 1000)
