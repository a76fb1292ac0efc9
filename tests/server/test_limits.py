from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from server.limits import Bucket
from server.settings import Settings
from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine
from tests.server.sse import until


@pytest.mark.parametrize("limit", ["max_concurrent_per_key", "max_requests_per_minute_per_key"])
def test_limits_of_keys_need_keys(limit: str) -> None:
    with pytest.raises(ValidationError, match="needs --api-key"):
        Settings(**{limit: 1})


@given(capacity=st.integers(1, 100), waits=st.lists(st.floats(0, 200), max_size=60))
def test_a_bucket_gives_its_capacity_and_as_much_a_minute(capacity: int, waits: list[float]) -> None:
    bucket = Bucket(capacity, capacity, 0.0)
    now = taken = 0.0
    for wait in waits:
        now += wait
        refused = bucket.take(now)
        taken += refused == 0
        assert taken <= capacity + now * capacity / 60 + 1e-6
        if refused:
            again = Bucket(bucket.capacity, bucket.level, bucket.at)
            assert again.take(now + refused * 1.001) == 0


async def post(client: httpx.AsyncClient, key: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await client.post("/v1/completions", json={"prompt": "go", "max_tokens": 6, **body}, headers=headers)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("streamed", [False, True])
async def test_running_requests_of_a_key(fake: FakeEngine, start: Start, streamed: bool) -> None:
    client = (await start(api_key=["a", "b"], max_concurrent_per_key=2)).client
    fake.paused = True
    running = [asyncio.create_task(post(client, "a", stream=streamed)) for _ in range(2)]
    await until(lambda: len(fake.seen) == 2)
    refused = await post(client, "a")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert (refused.json()["error"]["type"], refused.json()["error"]["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert (await client.get("/v1/models", headers={"authorization": "Bearer a"})).status_code == 200
    other = asyncio.create_task(post(client, "b"))
    await until(lambda: len(fake.seen) == 3)
    fake.paused = False
    assert [response.status_code for response in await asyncio.gather(*running, other)] == [200] * 3
    assert (await post(client, "a")).status_code == 200


@pytest.mark.asyncio(loop_scope="session")
async def test_requests_of_a_key_per_minute(fake: FakeEngine, start: Start) -> None:
    client = (await start(api_key=["a", "b"], max_requests_per_minute_per_key=2)).client
    assert [(await post(client, key)).status_code for key in "aaab"] == [200, 200, 429, 200]
    assert 1 <= int((await post(client, "a")).headers["retry-after"]) <= 30
