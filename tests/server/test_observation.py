import time
from collections.abc import AsyncGenerator

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from minedraft_core.types import RequestRecord, now_us
from server.observation import observed


def output(token_ids: list[int], finish_reason: str | None = None) -> RequestOutput:
    choice = CompletionOutput(0, "", token_ids, None, None, finish_reason=finish_reason)
    return RequestOutput("r", None, [1, 2, 3], None, [choice], finish_reason is not None)


async def steps(*outputs: RequestOutput, error: Exception | None = None) -> AsyncGenerator[RequestOutput, None]:
    for item in outputs:
        yield item
    if error is not None:
        raise error


async def test_a_finished_choice_is_reported_with_its_times_and_tokens() -> None:
    records: list[RequestRecord] = []
    begin = now_us()
    passed = [item async for item in observed(steps(output([]), output([5, 6]), output([7], "stop")), "r", 3, records.append)]
    assert [item.outputs[0].token_ids for item in passed] == [[], [5, 6], [7]]
    (record,) = records
    assert (record.request_id, record.prompt_len, record.gen_len, record.finish_reason) == ("r", 3, 3, "stop")
    assert begin <= record.start_us <= record.first_token_us <= record.end_us <= now_us()


async def test_the_first_token_is_timed_by_the_engine_where_only_the_last_output_comes() -> None:
    records: list[RequestRecord] = []
    whole = output([5, 6, 7], "length")
    delivered = time.monotonic() + 0.25
    whole.metrics = RequestStateStats(first_token_ts=delivered)
    _ = [item async for item in observed(steps(whole), "r", 3, records.append)]
    assert records[0].first_token_us == round(delivered * 1e6)


async def test_a_choice_that_is_left_counts_as_aborted() -> None:
    records: list[RequestRecord] = []
    outputs = observed(steps(output([5]), output([6], "length")), "r", 3, records.append)
    await anext(outputs)
    await outputs.aclose()
    assert [(record.gen_len, record.finish_reason) for record in records] == [(1, "abort")]


async def test_a_choice_that_fails_counts_as_an_error() -> None:
    records: list[RequestRecord] = []
    with pytest.raises(RuntimeError):
        _ = [item async for item in observed(steps(output([5]), error=RuntimeError("no")), "r", 3, records.append)]
    assert [(record.gen_len, record.finish_reason) for record in records] == [(1, "error")]


async def test_without_a_token_there_is_no_first_time() -> None:
    records: list[RequestRecord] = []
    _ = [item async for item in observed(steps(output([], "abort")), "r", 3, records.append)]
    assert [(record.first_token_us, record.finish_reason) for record in records] == [(0, "abort")]


async def test_a_choice_refused_for_what_the_client_asked_is_not_reported() -> None:
    records: list[RequestRecord] = []
    with pytest.raises(VLLMValidationError):
        _ = [item async for item in observed(steps(error=VLLMValidationError("no")), "r", 3, records.append)]
    assert records == []
