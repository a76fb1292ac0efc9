"""The page at /dashboard: its events, its guard, and how it looks in Chromium."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from minedraft_core.feed import FeedMessage
from minedraft_core.types import DrafterRecord, DraftRecord, LookaheadRecord, Mode, ModeRecord, StepRecord, now_us
from server.dashboard import PATHS, Dashboard, dashboard_router
from tests.server.browser import colours, launched, needs_chromium
from tests.server.conftest import Running, Start

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]
PHONE = {"width": 360, "height": 740}


def pass_of(start_us: int, side: int, **changes: Any) -> StepRecord:
    """A pass of 30 ms over one of two sides: 8 tokens verified, 4 of them accepted in 2 drafts, 6 delivered."""
    fields: dict[str, Any] = {
        "step": 1,
        "start_us": start_us,
        "end_us": start_us + 30_000,
        "mode": Mode.PARALLEL,
        "side": side,
        "is_prompt_run": False,
        "is_parallelised": True,
        "batched_requests": 2,
        "preempted_requests": 0,
        "batched_token_num": 10,
        "proposed_len": 8,
        "verify_len": 8,
        "accepted_num": 4,
        "generated_num": 6,
        "measured_draft_time": 0.02,
        "measured_target_time": 0.03,
        "measured_overhead_time": 0.001,
        "gap_us": 10_000,
        "num_speculative_tokens": 4,
        "side_requests": (3, 2),
        "drafter_wait_us": 0,
        "drafts": [(4, 3), (4, 1)],
        "dropped": {},
    }
    return StepRecord(**{**fields, **changes})


def draft_of(start_us: int) -> DraftRecord:
    """Drafting of 20 ms of which 18 are hidden."""
    return DraftRecord(1, start_us, start_us + 20_000, 18_000, 2, [2, 2, 2, 2])


@asynccontextmanager
async def at_work(dashboard: Dashboard) -> AsyncIterator[None]:
    """Two sides in turn, 25 passes a second, until the block is left."""

    async def go() -> None:
        number = 0
        while True:
            start = now_us() - 40_000
            dashboard(FeedMessage(0, [pass_of(start, number % 2), draft_of(start + 12_000)]))
            number += 1
            await asyncio.sleep(0.04)

    dashboard(FeedMessage(0, [ModeRecord(Mode.PARALLEL, 4), DrafterRecord(up=True, restarted=False, reason="loaded")]))
    task = asyncio.create_task(go())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Served:
    """A server with a dashboard."""

    def __init__(self, dashboard: Dashboard, running: Running) -> None:
        self.dashboard, self.running = dashboard, running
        self.url = f"http://127.0.0.1:{running.port}"


@pytest_asyncio.fixture(loop_scope="session")
async def served(start: Start) -> Served:
    dashboard = Dashboard()
    running = await start(api_key=["sk-1"], routers=(dashboard_router(dashboard, lambda: running.lifecycle.draining),))
    return Served(dashboard, running)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        yield await launched(playwright)


@asynccontextmanager
async def opened(browser: Browser, served: Served, **options: Any) -> AsyncIterator[Page]:
    """The page, with whatever it complains of collected; nothing may be asked of another server."""
    complaints: list[str] = []
    context = await browser.new_context(http_credentials={"username": "any", "password": "sk-1"}, **options)
    page = await context.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if not request.url.startswith((served.url, "data:")) else None)
    await page.goto(f"{served.url}/dashboard")
    try:
        yield page
        assert complaints == []
    finally:
        await context.close()


async def first_update(served: Served) -> dict[str, Any]:
    async with served.running.client.stream("GET", "/dashboard/events", auth=("any", "sk-1")) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                update: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return update
    raise AssertionError("the stream ended")


async def test_an_update_holds_what_happened(served: Served) -> None:
    start = now_us() - 100_000
    records = [
        ModeRecord(Mode.PARALLEL, 4),
        DrafterRecord(up=True, restarted=True, reason="loaded"),
        pass_of(start - 60_000_000, 0),
        pass_of(start, 1),
        draft_of(start),
        LookaheadRecord(start, start + 9_000, 8_000, 3, 1, 5),
    ]
    served.dashboard(FeedMessage(0, records))
    update = await first_update(served)
    assert update["passes"] == [[start, start + 30_000, 1, 2, False, 8, 4, 2, 6, 10_000]]
    assert update["draftings"] == [[start, start + 20_000, 18_000]]
    assert update["aheads"] == [[start, start + 9_000, 8_000, 3, 1, 5]]
    assert update["state"] == {"mode": "parallel", "num_speculative_tokens": 4, "sides": [3, 2], "drafter_up": True, "restarts": 1}
    assert update["now_us"] >= start


async def test_only_what_is_new_follows() -> None:
    dashboard = Dashboard(clock=lambda: 1_000_000)
    dashboard(FeedMessage(0, [pass_of(0, 0)]))
    update, seen = dashboard.since(0)
    assert len(update.passes) == 1
    assert dashboard.since(seen)[0].passes == []
    dashboard(FeedMessage(0, [pass_of(10, 1)]))
    assert [run.start_us for run in dashboard.since(seen)[0].passes] == [10]
    for _ in range(3):
        dashboard(FeedMessage(0, [pass_of(number, 0) for number in range(3000)]))
    assert len(dashboard.since(seen)[0].passes) == 4096, "the oldest give way"


@pytest.mark.parametrize("path", PATHS)
async def test_the_page_is_guarded(served: Served, path: str) -> None:
    client = served.running.client
    refused = await client.get(path)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    for password in ("", "sk-2", "sk-1x"):
        assert (await client.get(path, auth=("sk-1", password))).status_code == 401
    for broken in ("Basic", "Basic sk-1", "Basic !!!", "Basic c2stMQ=="):
        assert (await client.get(path, headers={"authorization": broken})).status_code == 401


async def test_a_password_opens_the_pages_alone(served: Served) -> None:
    client = served.running.client
    assert (await client.get("/dashboard", auth=("any", "sk-1"))).status_code == 200
    assert (await client.get("/dashboard", headers={"authorization": "Bearer sk-1"})).status_code == 200
    assert (await client.get("/v1/models", auth=("any", "sk-1"))).status_code == 401


async def test_the_stream_ends_when_the_server_drains(served: Served) -> None:
    async with served.running.client.stream("GET", "/dashboard/events", auth=("any", "sk-1")) as response:
        lines = response.aiter_lines()
        await anext(lines)
        served.running.lifecycle.drain(float("-inf"))
        with suppress(httpx.RemoteProtocolError):
            async for _ in lines:
                pass
    assert await served.running.task == 0


@needs_chromium
async def test_the_page_shows_the_pipeline_at_work(browser: Browser, served: Served) -> None:
    async with at_work(served.dashboard), opened(browser, served, viewport={"width": 1100, "height": 760}) as page:
        await expect(page.locator("#status")).to_have_text("Live, last 10 seconds")
        await asyncio.sleep(3.5)
        assert not await page.is_visible("#lookahead")
        text = {name: await page.inner_text(f"#{name}") for name in ("hidden", "acceptance", "busy", "times", "mode", "drafter")}
        assert text == {
            "hidden": "90 %",
            "acceptance": "50 %\nlength 3.00",
            "busy": "75 %",
            "times": "30.0 / 20.0\nms",
            "mode": "parallel\n4 tokens",
            "drafter": "up",
        }
        assert int(await page.inner_text("#throughput")) > 0
        assert [await page.inner_text(f"#count-{side}") for side in "ab"] == ["3", "2"]
        seen: set[str] = set()
        for _ in range(20):
            seen |= await colours(page)
            await asyncio.sleep(0.2)
        assert seen >= {"a", "b", "hidden", "exposed"}, "the exposed part may be a pixel wide and blend with its neighbour"
        if folder := os.environ.get("SCREENSHOTS"):
            await page.screenshot(path=f"{folder}/dashboard.png")
        await page.click("#pause")
        await asyncio.sleep(0.2)
        before = await page.evaluate("document.getElementById('lanes').toDataURL()")
        await asyncio.sleep(0.5)
        assert await page.evaluate("document.getElementById('lanes').toDataURL()") == before


@needs_chromium
async def test_the_page_shows_what_lookahead_yields(browser: Browser, served: Served) -> None:
    async with opened(browser, served, viewport={"width": 1100, "height": 760}) as page:
        served.dashboard(FeedMessage(0, [ModeRecord(Mode.PEARL, 4), DrafterRecord(up=True, restarted=False, reason="loaded")]))
        begin = now_us() - 500_000
        for number in range(5):
            start = begin + number * 50_000
            ahead = LookaheadRecord(start, start + 20_000, 20_000, 3, 1, 6)
            served.dashboard(FeedMessage(0, [pass_of(start, -1), draft_of(start + 20_000), ahead]))
        await expect(page.locator("#hits")).to_have_text("75 %30 tokens/s discarded")
        assert await page.is_visible("#lookahead")
        # 18 of 20 ms of each order, and all 20 of what was drafted ahead.
        assert await page.inner_text("#hidden") == "95 %"
        served.dashboard(FeedMessage(0, [ModeRecord(Mode.PARALLEL, 4)]))
        await page.wait_for_selector("#lookahead", state="hidden")


@needs_chromium
async def test_a_dead_drafter_and_a_lost_server_are_seen(browser: Browser, served: Served) -> None:
    served.dashboard(FeedMessage(0, [DrafterRecord(up=False, restarted=False, reason="died")]))
    async with opened(browser, served) as page:
        await page.wait_for_selector("#drafter.bad")
        assert await page.inner_text("#drafter") == "down"
        assert await page.inner_text("#status") == "No requests"
        served.running.lifecycle.drain(float("-inf"))
        await page.wait_for_selector("#status.bad")
    assert await served.running.task == 0


@needs_chromium
async def test_the_page_fits_a_phone(browser: Browser, served: Served) -> None:
    async with at_work(served.dashboard), opened(browser, served, viewport=PHONE, device_scale_factor=2, has_touch=True) as page:
        await expect(page.locator("#status")).to_have_text("Live, last 10 seconds")
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        sizes = "[...document.querySelectorAll('body *')].filter(e => e.textContent).map(e => parseFloat(getComputedStyle(e).fontSize))"
        assert min(await page.evaluate(sizes)) >= 12
        if folder := os.environ.get("SCREENSHOTS"):
            await asyncio.sleep(3)
            await page.screenshot(path=f"{folder}/dashboard-phone.png")
