from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine
from tests.server.sse import chat, chat_stream, complete, refused, stream
from tests.server.tiny_engine import NUM_DRAFTS

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "include_speculation_metrics": True}


def check(report: dict[str, Any], choices: int = 1) -> None:
    """What must hold between the counts, whatever they are."""
    histogram, accepted = report["acceptance_histogram"], report["num_accepted_draft_tokens"]
    assert sum(histogram) == report["num_spec_steps"]
    assert sum(count * length for length, count in enumerate(histogram)) == accepted == sum(report["accepted_per_position"])
    assert accepted <= report["num_draft_tokens"] <= report["num_spec_steps"] * report["num_spec_tokens"]
    if report["num_spec_steps"]:
        assert report["mean_acceptance_length"] == pytest.approx(1 + accepted / report["num_spec_steps"])
    assert report["num_spec_steps"] + accepted <= choices * ASK["max_tokens"]


def speculates(engine: Any) -> bool:
    return isinstance(engine, FakeEngine) or engine.vllm_config.speculative_config is not None


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("n", [1, 2])
async def test_the_report_comes_when_asked(client: httpx.AsyncClient, engine: Any, ask: Any, n: int) -> None:
    prompt = {"prompt": "the quick"} if ask is complete else {}
    body = await ask(client, **prompt, **ASK, n=n)
    report = body["metrics"]["speculative_decoding"]
    assert (report is not None) == speculates(engine)
    if report is not None:
        assert report["num_draft_tokens"] > 0
        check(report, n)
    assert "metrics" not in await ask(client, **prompt, **(ASK | {"include_speculation_metrics": False}))


@pytest.mark.parametrize("ask", [stream, chat_stream])
async def test_streams_report_each_choice_and_all(client: httpx.AsyncClient, engine: Any, ask: Any) -> None:
    prompt = {"prompt": "the quick"} if ask is stream else {}
    chunks = await ask(client, **prompt, **ASK, n=2, stream_options={"include_usage": True})
    with_metrics = [chunk for chunk in chunks if "metrics" in chunk]
    assert [[choice["finish_reason"] for choice in chunk["choices"]] for chunk in with_metrics] == [["length"], ["length"], []]
    reports = [chunk["metrics"]["speculative_decoding"] for chunk in with_metrics]
    if not speculates(engine):
        assert reports == [None] * 3
        return
    for report in reports[:2]:
        check(report)
    check(reports[2], 2)
    for count in ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps"):
        assert reports[2][count] == reports[0][count] + reports[1][count]


async def test_opting_out(client: httpx.AsyncClient, engine: Any) -> None:
    with_drafts = await complete(client, prompt="the quick", **ASK)
    plain = await complete(client, prompt="the quick", **ASK, num_speculative_tokens=0)
    assert plain["choices"] == with_drafts["choices"]
    if speculates(engine):
        assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


async def test_fewer_drafts(client: httpx.AsyncClient, engine: Any) -> None:
    body = await complete(client, prompt="the quick", **ASK, num_speculative_tokens=1)
    if speculates(engine):
        report = body["metrics"]["speculative_decoding"]
        check(report)
        assert 0 < report["num_draft_tokens"] <= report["num_spec_steps"]


async def test_requests_of_several_limits_run_side_by_side(client: httpx.AsyncClient) -> None:
    texts = [
        (await complete(client, prompt="the quick", **ASK, n=2, num_speculative_tokens=limit))["choices"][1]["text"]
        for limit in range(NUM_DRAFTS + 1)
    ]
    assert len(set(texts)) == 1


@pytest.mark.parametrize(("configured", "wanted"), [(3, 4), (0, 1)])
async def test_more_than_the_server_drafts_is_refused(fake: FakeEngine, start: Start, configured: int, wanted: int) -> None:
    client = (await start(speculative_config={"model": "draft", "num_speculative_tokens": configured})).client
    error = await refused(client, 400, prompt="x", num_speculative_tokens=wanted)
    assert error["param"] == "num_speculative_tokens"
    assert str(configured) in error["message"]
    await complete(client, prompt="x", num_speculative_tokens=0)


async def test_the_flag_reports_in_every_response(fake: FakeEngine, start: Start) -> None:
    client = (await start(per_request_spec_decode_metrics="summary")).client
    assert "speculative_decoding" in (await complete(client, prompt="x"))["metrics"]
