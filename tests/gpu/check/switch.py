"""Modes and draft lengths change under load, by the control channel: no token is lost, and greedy text stays as it was."""

from __future__ import annotations

import asyncio

from minedraft_core.bench.prompts import read_prompts
from minedraft_core.control import ModeOrder
from minedraft_core.types import Mode, ModeRecord, StepRecord
from tests.gpu.check.asking import Ask, answer, answers
from tests.gpu.check.basics import BATCH, TIE, engine, quick, summary
from tests.gpu.check.findings import attempt, say

TOKENS, PAUSE = 192, 0.2


def orders(mode: str, k: int) -> list[ModeOrder]:
    """What an engine started in `mode` is told in turn, ending as it began."""
    ahead = [ModeOrder(Mode.PEARL, k), ModeOrder(Mode.PEARL, max(1, k - 2))] if mode == "pearl" else []
    half = max(1, k // 2)
    return [
        ModeOrder(Mode.SEQUENTIAL, half),
        ModeOrder(Mode.PARALLEL, k),
        *ahead,
        ModeOrder(Mode.PARALLEL, 1),
        ModeOrder(Mode.SEQUENTIAL, k),
        ModeOrder(Mode.OFF, 0),
        ModeOrder(Mode(mode), k),
    ]


def stage_switch(arguments) -> None:
    with engine(arguments, arguments.target, None, "off", None, BATCH, *quick()) as running:
        prompts = running.tokenize(read_prompts()[:48])
        asks = [Ask(prompt, {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 20}) for prompt in prompts]
        plain = [output.outputs[0] for output in answers(running, asks, BATCH)]
    for mode in ("parallel", "pearl"):
        device = arguments.devices[0]
        with attempt(mode):
            with engine(arguments, arguments.target, arguments.draft, mode, device, BATCH, *quick()) as running:
                outputs, given = running._runner.run(_under_orders(running, prompts, orders(mode, arguments.k)))
                records = running.take_records(len(prompts) * TOKENS)
            _judge(mode, [output.outputs[0] for output in outputs], plain, given, records)


async def _under_orders(running, prompts, plan: list[ModeOrder]):
    """The answers, and how many orders were given while they came: the plan again and again, one order after a short pause."""
    given, places = 0, asyncio.Semaphore(BATCH)

    async def one(prompt):
        async with places:
            return await answer(running, Ask(prompt, {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}))

    asked = asyncio.gather(*(one(prompt) for prompt in prompts))
    while not asked.done():
        order = plan[given % len(plan)]
        in_force = await asyncio.to_thread(running._control.set_mode, order)
        assert in_force == order, (in_force, order)
        given += 1
        await asyncio.wait([asked], timeout=PAUSE)
    return await asked, given


def _judge(mode: str, got, plain, given: int, records) -> None:
    same, gaps = 0, []
    for ours, theirs in zip(got, plain, strict=True):
        tokens, wanted = list(ours.token_ids), list(theirs.token_ids)
        at = next((at for at, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b), None)
        if at is None:
            same += 1
        else:
            seen = {token: entry.logprob for token, entry in theirs.logprobs[at].items()}
            gaps.append(round(abs(seen.get(tokens[at], -99.0) - seen[wanted[at]]), 3))
    say(all(gap <= TIE for gap in gaps), f"{mode}: {same} of {len(got)} identical through {given} orders, others part at gaps {gaps}")
    steps = [record for record in records if isinstance(record, StepRecord)]
    delivered, wanted = sum(step.generated_num for step in steps), sum(len(output.token_ids) for output in got)
    say(delivered == wanted, f"{mode}: {delivered} tokens in the records of the passes, {wanted} delivered")
    changes = sum(isinstance(record, ModeRecord) for record in records)
    verified = {
        str(one): sum(step.accepted_num for step in steps if step.mode is one) for one in Mode if any(step.mode is one for step in steps)
    }
    say(given >= 4 and len(verified) >= 3, f"{mode}: {changes} changes; accepted by mode {verified}; {summary(records)}")
