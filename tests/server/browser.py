"""Chromium, and what the tests of the page at /dashboard ask of it."""

from __future__ import annotations

import shutil

import pytest
from playwright.async_api import Browser, Page, Playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


async def launched(playwright: Playwright) -> Browser:
    """The system's Chromium, without a window. Its own sandbox does not start for root, nor in most containers."""
    return await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


async def colours(page: Page) -> set[str]:
    """Which of the legend's colours are on the canvas."""
    found: list[str] = await page.evaluate("""() => {
        const canvas = document.getElementById("lanes");
        const copy = Object.assign(document.createElement("canvas"), {width: canvas.width, height: canvas.height});
        const context = copy.getContext("2d", {willReadFrequently: true});
        context.drawImage(canvas, 0, 0);
        const {data} = context.getImageData(0, 0, canvas.width, canvas.height);
        const seen = new Set();
        for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.add(`rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`);
        return ["a", "b", "prompt", "hidden", "exposed"].filter(
            name => seen.has(getComputedStyle(document.querySelector(`.i-${name}`)).backgroundColor));
    }""")
    return set(found)
