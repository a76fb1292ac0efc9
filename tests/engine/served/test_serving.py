"""`minedraft serve` as a person starts it: the embedded default over HTTP, two sides, its own process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.engine.server_process import Served

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_a_client_gets_sensible_text(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        (model,) = client.models.list().data
        answer = client.completions.create(model=model.id, prompt="The capital of France is", max_tokens=12, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_two_sides_are_at_work(served: Served) -> None:
    fields: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            prompts = [f"Tell me {number} things about the sea." for number in range(6)]
            await asyncio.gather(*(client.completions.create(prompt=prompt, **fields) for prompt in prompts))

    asyncio.run(run())
    assert served.metric("minedraft_mode", mode="parallel") == 1
    assert served.metric("minedraft_num_speculative_tokens") == 4
    assert served.metric("minedraft_drafter_up") == 1
    assert served.metric("minedraft_draft_hidden_seconds_total") > 0
    steps = served.lines("step")
    assert {step["side"] for step in steps} - {-1} == {0, 1}
    assert any(step["is_parallelised"] for step in steps)
    assert served.metric("minedraft_verified_tokens_total") == sum(step["verify_len"] for step in steps)
    assert served.metric("minedraft_accepted_tokens_total") == sum(step["accepted_num"] for step in steps)
    assert served.metric("minedraft_generation_tokens_total") == sum(step["generated_num"] for step in steps)


def test_streaming_is_real(served: Served) -> None:
    before = len(served.lines("step")), len(served.lines("request"))
    arrivals: list[tuple[int, str]] = []
    body = {"prompt": "Once upon a time", "max_tokens": 48, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        arrivals.extend(
            (time.monotonic_ns() // 1000, json.loads(line[6:])["choices"][0]["text"])
            for line in response.iter_lines()
            if line.startswith("data: {")
        )
    time.sleep(0.5)
    steps = [step for step in served.lines("step")[before[0] :] if step["generated_num"]]
    (request,) = served.lines("request")[before[1] :]
    assert len(arrivals) >= len(steps)
    longest = max(step["end_us"] - step["start_us"] for step in steps)
    assert arrivals[0][0] - steps[0]["end_us"] < 2 * longest
    assert request["gen_len"] == 48
    assert request["finish_reason"] == "length"


def test_the_first_token_is_timed_without_streaming_too(served: Served) -> None:
    before = len(served.lines("request"))
    body = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    time.sleep(0.5)
    (request,) = served.lines("request")[before:]
    assert 0 < request["first_token_us"] - request["start_us"] < (request["end_us"] - request["start_us"]) / 2


def test_clients_that_go_away_leave_nothing_behind(served: Served) -> None:
    """120 requests, every third dropped in mid-stream."""
    _drop_every_third(served, 120)


@pytest.mark.slow
def test_a_thousand_clients_of_which_every_third_goes_away(served: Served) -> None:
    """1,000 requests, every third dropped in mid-stream."""
    _drop_every_third(served, 1000)


def _drop_every_third(served: Served, number: int) -> None:
    finished = {reason: served.metric("minedraft_requests_finished_total", reason=reason) for reason in ("length", "abort")}

    async def one(client: httpx.AsyncClient, slots: asyncio.Semaphore, index: int) -> None:
        body = {"prompt": f"Number {index}:", "max_tokens": 12, "stream": True, "ignore_eos": True, "seed": index}
        async with slots, client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            chunks = 0
            async for _ in response.aiter_lines():
                chunks += 1
                if index % 3 == 0 and chunks > random.Random(index).randrange(6):
                    return

    async def run() -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as client:
            slots = asyncio.Semaphore(48)
            await asyncio.gather(*(one(client, slots, index) for index in range(number)))

    asyncio.run(run())
    deadline = time.monotonic() + 20
    while not served.idle():
        assert time.monotonic() < deadline
        time.sleep(0.25)
    ended = {reason: served.metric("minedraft_requests_finished_total", reason=reason) - count for reason, count in finished.items()}
    assert sum(ended.values()) == number
    assert ended["length"] >= number - -(-number // 3)
    assert served.metric("minedraft_sub_batch_requests", side="A") + served.metric("minedraft_sub_batch_requests", side="B") <= 1


def test_metrics_pass_promtool(served: Served) -> None:
    import shutil

    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    text = httpx.get(f"{served.url}/metrics", timeout=30).text
    own = "\n".join(line for line in text.splitlines() if "minedraft_" in line) + "\n"
    checked = subprocess.run([promtool, "check", "metrics"], input=own, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_sigterm_drains_then_ends(served: Served) -> None:
    """The last test of this server: a request that runs gets its answer, a new one is refused, no process stays.

    The signal goes to the engine's process too, as from a terminal or from systemd.
    """
    below = served.below()
    assert below

    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            body = {"prompt": "A long story:", "max_tokens": 60, "ignore_eos": True}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(1.0)
            os.killpg(served.process.pid, signal.SIGTERM)
            await asyncio.sleep(0.3)
            refused = await client.post("/v1/completions", json=body)
            return await running, refused

    answered, refused = asyncio.run(run())
    assert answered.json()["usage"]["completion_tokens"] == 60
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert served.process.wait(40) == 0
    log = served.log.read_text()
    assert "SIGTERM: no new requests are taken; 1 running may go on for at most 30 s" in log
    assert "the server has ended" in log
    _, alive = psutil.wait_procs(below, timeout=10)
    assert alive == []
