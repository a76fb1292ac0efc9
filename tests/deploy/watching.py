"""A real Prometheus with the repository's configuration, and the queries of the dashboards and rules."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.starter import free_port

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KEY = "a key for Prometheus"
SCRAPE_SECONDS = 0.5
_WORDS_OF_PROMQL = {"by", "on", "and", "or", "unless", "offset", "without", "ignoring", "bool", "group_left", "group_right"}


def dashboard_queries() -> list[tuple[str, str]]:
    """Dashboard and panel, and the expression, of every query that is checked in."""
    queries = []
    for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            queries.extend((f"{path.stem}: {panel['title']}", target["expr"]) for target in panel.get("targets", []))
    return queries


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of one of the files in deploy/prometheus/rules."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules" / f"{name}.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metric_names(expression: str) -> set[str]:
    """The names of the metrics in a PromQL expression."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", expression)
    bare = re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", "", bare)
    bare = re.sub(r"\boffset\s+\w+", "", bare)
    return set(re.findall(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", bare)) - _WORDS_OF_PROMQL


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    client: httpx.AsyncClient

    async def get(self, path: str, **params: str) -> Any:
        """What its API answers."""
        answer = (await self.client.get(f"/api/v1/{path}", params=params)).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression, evaluated now, with a dashboard's variables filled in."""
        expression = expression.replace("$__rate_interval", "5s").replace("$__range", "1m").replace("$instance", ".+")
        result: list[dict[str, Any]] = (await self.get("query", query=expression))["result"]
        return result

    async def values(self, expression: str) -> list[float]:
        """The values of an expression alone."""
        return [float(series["value"][1]) for series in await self.query(expression)]

    async def has_number(self, expression: str, *, seconds: float = 60.0) -> bool:
        """Whether the expression has a value that is a number, within so many seconds."""
        ends = asyncio.get_running_loop().time() + seconds
        while all(math.isnan(value) for value in await self.values(expression)):
            if asyncio.get_running_loop().time() > ends:
                return False
            await asyncio.sleep(0.2)
        return True

    async def until(self, expression: str, count: int = 1, *, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Wait until the expression has `count` series."""
        async with asyncio.timeout(seconds):
            while len(series := await self.query(expression)) < count:  # noqa: ASYNC110 - Prometheus tells nobody
                await asyncio.sleep(0.2)
        return series


@asynccontextmanager
async def prometheus(folder: Path, targets: list[str]) -> AsyncIterator[Prometheus]:
    """Prometheus over a copy of deploy/prometheus in `folder` that scrapes and evaluates faster."""
    shutil.copytree(DEPLOY / "prometheus", folder / "prometheus")
    (folder / "secrets").mkdir()
    (folder / "secrets" / "prometheus_key").write_text(KEY)
    path = folder / "prometheus" / "prometheus.yml"
    config = yaml.safe_load(path.read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"}
    port = free_port()
    for job in config["scrape_configs"]:
        # The name leads nowhere here; its look-ups would only wait for an answer.
        job.pop("dns_sd_configs", None)
        if job["job_name"] == "prometheus":
            job["static_configs"][0]["targets"] = [f"127.0.0.1:{port}"]
    path.write_text(yaml.safe_dump(config))
    (folder / "prometheus" / "targets" / "local.yml").write_text(yaml.safe_dump([{"targets": targets}]))
    command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 - it starts at once
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            async with asyncio.timeout(30):
                while not await _ready(client):
                    assert process.poll() is None, (folder / "prometheus.log").read_text()[-2000:]
                    await asyncio.sleep(0.1)
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(20)


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/-/ready")).status_code == 200
    except httpx.HTTPError:
        return False
