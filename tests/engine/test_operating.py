"""A real server under what its operators do to it and what happens to it; in float32, where every mode gives the same text."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.server_process import Served, serving, until
from tests.engine.workload import prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

KEY, OTHER_KEY = "sk-operator", "sk-other"
PER_KEY, IN_ALL, TOKENS = 12, 16, 48
PROMPTS = prompts()[:PER_KEY]
PLAIN = {"mode": "off", "num_speculative_tokens": 0}
MODES = [
    {"mode": "sequential", "num_speculative_tokens": 4},
    PLAIN,
    {"mode": "parallel", "num_speculative_tokens": 2},
    {"mode": "pearl", "num_speculative_tokens": 3},
    {"mode": "parallel", "num_speculative_tokens": 4},
]
_CONFIG = """\
dtype: float32
max_num_seqs: 8
max_num_queued_reqs: 16
api_key: [sk-operator, sk-other]
enable_admin: true
max_concurrent_per_key: 12
drafter_restart_backoff: 0.2
"""


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("operated")
    (folder / "config.yml").write_text(_CONFIG)
    with serving(folder, "--config", str(folder / "config.yml"), key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def plain(operated: Served) -> list[str]:
    """What the target alone says."""

    async def run(client: httpx.AsyncClient) -> list[str]:
        await switch(client, PLAIN)
        return await texts(client)

    return with_client(operated, run)


def with_client(server: Served, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=120, limits=limits) as client:
            return await work(client)

    return asyncio.run(run())


async def switch(client: httpx.AsyncClient, order: dict[str, Any]) -> None:
    response = await client.post("/admin/mode", json=order)
    assert (response.status_code, response.json()) == (200, order)


async def text(client: httpx.AsyncClient, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == TOKENS
    return str(response.json()["choices"][0]["text"])


async def texts(client: httpx.AsyncClient) -> list[str]:
    return await asyncio.gather(*(text(client, prompt) for prompt in PROMPTS))


def test_the_mode_changes_under_load_and_nothing_is_lost(operated: Served, plain: list[str]) -> None:
    async def run(client: httpx.AsyncClient) -> None:
        async def change() -> None:
            while True:
                for order in MODES:
                    await switch(client, order)
                    await asyncio.sleep(0.4)

        changes = asyncio.create_task(change())
        found = [await texts(client) for _ in range(3)]
        assert not changes.done()
        changes.cancel()
        assert found == [plain] * 3
        await switch(client, MODES[-1])

    seen = len(operated.lines("step"))
    with_client(operated, run)
    until(operated.idle)
    steps = operated.lines("step")[seen:]
    assert {step["mode"] for step in steps} == {order["mode"] for order in MODES}
    assert {side for step in steps if (side := step["side"]) >= 0} == {0, 1}


def test_a_drafter_killed_again_and_again_changes_no_text(operated: Served, plain: list[str]) -> None:
    """Twice, the second time once it is up again; requests run all the while."""
    killed: set[int] = set()

    def kill() -> None:
        while len(killed) < 2:
            up = operated.metric("minedraft_drafter_up") == 1
            for process in operated.below():
                if up and process.pid not in killed and _drafts(process):
                    process.kill()
                    killed.add(process.pid)
            time.sleep(0.5)

    async def run(client: httpx.AsyncClient) -> None:
        await switch(client, MODES[-1])
        kills = asyncio.create_task(asyncio.to_thread(kill))
        while not kills.done():
            assert await texts(client) == plain
        await kills
        assert await texts(client) == plain

    restarts = operated.metric("minedraft_drafter_restarts_total")
    with_client(operated, run)
    until(lambda: operated.metric("minedraft_drafter_up") == 1)
    assert operated.metric("minedraft_drafter_restarts_total") - restarts == len(killed)


def test_a_drafter_that_dies_while_nothing_runs_comes_back_by_itself(operated: Served) -> None:
    until(operated.idle)
    until(lambda: operated.metric("minedraft_drafter_up") == 1)
    steps, restarts = len(operated.lines("step")), operated.metric("minedraft_drafter_restarts_total")
    before = operated.draft_process()
    before.kill()
    until(lambda: operated.metric("minedraft_drafter_up") == 0, 5)
    until(lambda: operated.metric("minedraft_drafter_up") == 1)
    assert operated.metric("minedraft_drafter_restarts_total") == restarts + 1
    assert len(operated.lines("step")) == steps
    assert operated.draft_process().pid != before.pid


def test_a_key_at_its_limit_is_asked_to_wait(operated: Served) -> None:
    async def run(client: httpx.AsyncClient) -> list[httpx.Response]:
        body = {"prompt": "Tell me about the sea.", "max_tokens": TOKENS, "ignore_eos": True}
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(3 * PER_KEY)))

    answers = with_client(operated, run)
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= PER_KEY
    _check_refusals(answers, 429, "rate_limit_exceeded")


def test_a_full_queue_refuses_and_loses_nothing(operated: Served) -> None:
    async def run(client: httpx.AsyncClient) -> list[httpx.Response]:
        body = {"prompt": "Tell me about the sea.", "max_tokens": TOKENS, "ignore_eos": True}
        keys = [{"authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY) for _ in range(PER_KEY)]
        return await asyncio.gather(*(client.post("/v1/completions", json=body, headers=headers) for headers in keys))

    until(operated.idle)
    before = operated.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs")
    answers = with_client(operated, run)
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= IN_ALL
    assert all(answer.json()["usage"]["completion_tokens"] == TOKENS for answer in answers if answer.status_code == 200)
    _check_refusals(answers, 503, "queue_full")
    refused = operated.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") - before
    assert refused == statuses.count(503)
    assert operated.metric("minedraft_http_requests_total", route="/v1/completions", method="POST", status="503") >= refused
    until(operated.idle)
    assert with_client(operated, lambda client: text(client, PROMPTS[0]))


def test_one_request_can_be_too_large_for_the_queue(operated: Served) -> None:
    body = {"prompt": "x", "max_tokens": 1, "n": IN_ALL + 1}
    answer = httpx.post(f"{operated.url}/v1/completions", json=body, headers=operated.headers, timeout=60)
    assert answer.status_code == 503
    until(operated.idle)


def test_grammars_are_compiled_with_what_the_target_leaves(operated: Served) -> None:
    fields = {f"p{index}": {"type": "string", "maxLength": 40 + index} for index in range(6)}
    body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": {"type": "object", "properties": fields}}}
    assert httpx.post(f"{operated.url}/v1/completions", json=body, headers=operated.headers, timeout=60).status_code == 200
    levels = [_niceness(task) for process in operated.below() for task in Path(f"/proc/{process.pid}/task").iterdir()]
    assert 19 in levels
    assert 0 in levels


def test_a_killed_server_leaves_no_process(operated: Served) -> None:
    """The last test of this server, in the midst of requests."""
    below = operated.below()
    assert any(_drafts(process) for process in below)

    async def run(client: httpx.AsyncClient) -> None:
        tasks = [asyncio.create_task(text(client, prompt)) for prompt in PROMPTS]
        await asyncio.sleep(1.0)
        os.kill(operated.process.pid, signal.SIGKILL)
        await asyncio.gather(*tasks, return_exceptions=True)

    with_client(operated, run)
    _, alive = psutil.wait_procs(below, timeout=20)
    for process in alive:
        process.kill()
    assert alive == []


def _check_refusals(answers: list[httpx.Response], status: int, code: str) -> None:
    refused = [answer for answer in answers if answer.status_code == status]
    assert refused
    assert all(int(answer.headers["retry-after"]) > 0 and answer.json()["error"]["code"] == code for answer in refused)


def _drafts(process: psutil.Process) -> bool:
    try:
        return any("minedraft_core.vllm.cpu.process" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _niceness(task: Path) -> int:
    """The 19th field; the second one, a name in brackets, may hold spaces."""
    return int((task / "stat").read_text().rpartition(")")[2].split()[16])
