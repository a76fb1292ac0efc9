"""A real engine under load as Prometheus, Grafana's panels, the alerts and the page at /dashboard see it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from playwright.async_api import async_playwright, expect

from tests.deploy.watching import dashboard_queries, prometheus, rules
from tests.engine.server_process import Served
from tests.server.browser import colours, launched, needs_chromium

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


@asynccontextmanager
async def load(url: str, clients: int) -> AsyncIterator[None]:
    """So many clients, each with one request after another, until the block is left."""

    async def go(client: httpx.AsyncClient, number: int) -> None:
        while True:
            body = {"prompt": f"Tell me {number} things about the sea.", "max_tokens": 64, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        tasks = [asyncio.create_task(go(client, number)) for number in range(clients)]
        try:
            yield
            failed = [task.exception() for task in tasks if task.done()]
            assert failed == []
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@needs_prometheus
async def test_every_panel_has_data_and_a_killed_drafter_raises_its_alert(served: Served, tmp_path: Path) -> None:
    async with prometheus(tmp_path, [served.url.removeprefix("http://")]) as watcher, load(served.url, 6):
        await watcher.until("increase(minedraft_requests_finished_total{reason='length'}[20s]) > 3", seconds=120)
        for panel, expression in dashboard_queries():
            # Over a longer time than a panel's: two cores finish few requests in five seconds, and busy ones now and then none in twenty.
            assert await watcher.has_number(expression.replace("$__rate_interval", "20s")), panel
        groups = (await watcher.get("rules"))["groups"]
        assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []
        assert len([rule for group in groups for rule in group["rules"]]) == len(rules("alerts")) + len(rules("recording"))
        assert set(await watcher.values("scrape_samples_scraped - scrape_samples_post_metric_relabeling")) == {0.0}
        served.draft_process().send_signal(signal.SIGKILL)
        await watcher.until('ALERTS{alertname="MineDraftDrafterRestarting", alertstate="firing"}', seconds=120)
        assert await watcher.values("minedraft_drafter_up") == [1.0]


@needs_chromium
async def test_the_page_shows_the_pipeline_at_work(served: Served) -> None:
    async with load(served.url, 6), async_playwright() as playwright:
        browser = await launched(playwright)
        page = await browser.new_page(viewport={"width": 1100, "height": 620})
        await page.goto(f"{served.url}/dashboard")
        await expect(page.locator("#status")).to_have_text("Live, last 10 seconds", timeout=60_000)
        await asyncio.sleep(11)
        assert int((await page.inner_text("#hidden")).removesuffix(" %")) > 0
        assert (await page.inner_text("#mode")).startswith("parallel")
        assert int(await page.inner_text("#throughput")) > 0
        assert {"a", "b", "hidden"} <= await colours(page)
        if folder := os.environ.get("SCREENSHOTS"):
            await page.screenshot(path=f"{folder}/dashboard-engine.png")
        await browser.close()
