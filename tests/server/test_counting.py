from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine
from tests.server.sse import complete, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def counts(client: httpx.AsyncClient) -> Counter[tuple[str, str, str]]:
    text = (await client.get("/metrics", headers={"authorization": "Bearer sk-1"})).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return Counter(
        {
            (sample.labels["route"], sample.labels["method"], sample.labels["status"]): int(sample.value)
            for sample in samples
            if sample.name == "minedraft_http_requests_total"
        }
    )


async def test_generating_routes_are_there_from_the_start(start: Start) -> None:
    client = (await start()).client
    assert await counts(client) == {
        (path, "POST", status): 0 for path in ("/v1/completions", "/v1/chat/completions") for status in ("200", "500")
    }


async def test_requests_are_counted_by_what_was_answered(fake: FakeEngine, start: Start) -> None:
    client = (await start()).client
    await complete(client, prompt="x")
    await complete(client, prompt="x", stream=False)
    await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    await client.post("/v1/completions", json={})
    await client.get("/v1/completions")
    await client.get("/v1/models/served")
    await client.get("/v1/models/no/such/model")
    await client.get("/nothing/7f3a")
    await client.request("PURGE", "/v1/models")
    await client.get("/docs")
    await client.get("/health", headers={"x-request-id": "not allowed"})
    found = +await counts(client)
    assert found == {
        ("/v1/completions", "POST", "200"): 3,
        ("/v1/completions", "POST", "400"): 1,
        ("/v1/completions", "GET", "405"): 1,
        ("/v1/models/{model:path}", "GET", "200"): 1,
        ("/v1/models/{model:path}", "GET", "404"): 1,
        ("none", "GET", "404"): 1,
        ("/v1/models", "other", "405"): 1,
        ("/docs", "GET", "200"): 1,
        ("/health", "GET", "400"): 1,
    }
    assert (await counts(client))["/metrics", "GET", "200"] == 1


async def test_refusals_before_the_route_have_it_too(start: Start) -> None:
    client = (await start(api_key=["sk-1"], max_requests_per_minute_per_key=1)).client
    key = {"authorization": "Bearer sk-1"}
    for headers in ({}, key, key):
        await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    found = await counts(client)
    assert [found["/v1/completions", "POST", status] for status in ("401", "200", "429")] == [1, 1, 1]


async def test_a_client_that_leaves_and_a_failure(fake: FakeEngine, start: Start) -> None:
    client = (await start()).client
    fake.paused = True
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, timeout=0.2)
    await until(lambda: not fake.unfinished)
    fake.paused = False
    fake.step_seconds = 0.05
    running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "go on", "max_tokens": 300}))
    await until(lambda: fake.unfinished > 0)
    fake.fail()
    assert (await running).status_code == 500
    found = await counts(client)
    assert found["/v1/chat/completions", "POST", "499"] == 1
    assert found["/v1/completions", "POST", "500"] == 1


async def test_whatever_clients_send_the_series_stay_few(start: Start) -> None:
    client = (await start()).client
    for index in range(100):
        await client.request(("GET", "POST", "DELETE", "REPORT")[index % 4], f"/x{index}/completions?x={index}")
    assert set(+await counts(client)) == {("none", method, "404") for method in ("GET", "POST", "other")}
