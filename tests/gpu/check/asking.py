"""Requests with parameters of every kind, asked together."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ask:
    """One request: a prompt's tokens and what vLLM's `SamplingParams` takes. With `abort_after` it is aborted at so many tokens."""

    prompt: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    abort_after: int | None = None


async def answer(running, ask: Ask):
    """The last output of a request, with `outputs` in order; None for one that was aborted."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    from server.sampling import ServingParams

    kind = RequestOutputKind.FINAL_ONLY if ask.abort_after is None else RequestOutputKind.CUMULATIVE
    params = ServingParams(**{"detokenize": False, **ask.params}, output_kind=kind)
    last, request_id = None, uuid.uuid4().hex
    async for output in running._engine.generate(TokensPrompt(prompt_token_ids=ask.prompt), params, request_id):
        last = output
        if ask.abort_after is not None and len(output.outputs[0].token_ids) >= ask.abort_after:
            await running._engine.abort(request_id)
            return None
    return last


def answers(running, asks: list[Ask], concurrency: int) -> list:
    """The outputs of all requests, at most so many at a time, in the order of the requests."""

    async def all_of_them():
        places = asyncio.Semaphore(concurrency)

        async def one(ask):
            async with places:
                return await answer(running, ask)

        return await asyncio.gather(*(one(ask) for ask in asks))

    return running._runner.run(all_of_them())
