"""How long each choice took, seen where the client sees it: the pipeline's request records are made here.

The engine's scheduler cannot make them: a stop string is found outside it, and looks to it like an abort.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from minedraft_core.types import RequestRecord, now_us

Report = Callable[[RequestRecord], None]


def ignore(_: RequestRecord) -> None:
    """For a server whose requests nobody counts."""


async def observed(
    outputs: AsyncGenerator[RequestOutput, None], request_id: str, prompt_len: int, report: Report
) -> AsyncGenerator[RequestOutput, None]:
    """Pass the outputs of one choice on and report it when it ends; one that is left early ended by "abort".

    A choice that the engine refuses for what the client asked was never taken and is not reported.
    """
    start, scheduled, first, tokens, reason = now_us(), 0, 0, 0, "abort"
    try:
        async with aclosing(outputs):
            async for output in outputs:
                completion = output.outputs[0]
                tokens += len(completion.token_ids)
                first = first or (_first_token_us(output) if tokens else 0)
                scheduled = scheduled or _scheduled_us(output)
                reason = completion.finish_reason or reason
                yield output
    except VLLMClientError:
        reason = ""
        raise
    except Exception:
        reason = "error"
        raise
    finally:
        if reason:
            report(RequestRecord(request_id, start, first, now_us(), prompt_len, tokens, reason, scheduled))


def _first_token_us(output: RequestOutput) -> int:
    """When the engine delivered the first token; a request that does not stream shows it with its last output only.

    Without vLLM's statistics (`--disable-log-stats`) it is now.
    """
    delivered = output.metrics.first_token_ts if isinstance(output.metrics, RequestStateStats) else 0.0
    return round(delivered * 1e6) if delivered > 0 else now_us()


def _scheduled_us(output: RequestOutput) -> int:
    """When the engine first scheduled the prompt, 0 without vLLM's statistics."""
    return round(output.metrics.scheduled_ts * 1e6) if isinstance(output.metrics, RequestStateStats) else 0
