"""The rules and dashboards as they lie in the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana.make_dashboards import DASHBOARDS, FOLDER
from deploy.grafana.panels import build
from tests.deploy.watching import DEPLOY, dashboard_queries, metric_names, rules

ALERTS = rules("alerts")
TESTS = (DEPLOY / "prometheus" / "tests" / "alerts.yml").read_text()
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: object, folder: Path = DEPLOY) -> str:
    result = subprocess.run(["promtool", *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("uid", list(DASHBOARDS))
def test_the_checked_in_dashboard_is_what_its_source_makes(uid: str) -> None:
    title, rows = DASHBOARDS[uid]
    assert (FOLDER / f"{uid}.json").read_text() == build(uid, title, rows)


def test_no_other_dashboard_is_checked_in() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(DASHBOARDS)


@pytest.mark.parametrize(("panel", "expression"), dashboard_queries())
def test_a_panel_shows_the_chosen_servers_only(panel: str, expression: str) -> None:
    names = re.findall(r"(?:minedraft_|vllm:)\w+", expression)
    assert names
    assert expression.count('{instance=~"$instance"') == len(names)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert alert["annotations"].keys() == {"summary", "description", "runbook"}
    assert all(text.strip() and "\n" not in text.strip() for text in alert["annotations"].values())


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_is_seen_to_fire(alert: dict[str, Any]) -> None:
    assert f'alertname="{alert["alert"]}"' in TESTS.replace(f'alertname!="{alert["alert"]}"', "")


@needs_promtool
def test_the_rules_pass_their_unit_tests() -> None:
    assert "SUCCESS" in promtool("test", "rules", "prometheus/tests/alerts.yml")


@needs_promtool
def test_promtool_accepts_configuration_and_rules(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY / "prometheus", tmp_path / "prometheus")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "prometheus_key").write_text("key")
    output = promtool("check", "config", "prometheus/prometheus.yml", folder=tmp_path)
    assert sum(map(int, re.findall(r"(\d+) rules found", output))) == len(ALERTS) + len(rules("recording"))


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (le, slo) (rate(a_bucket{x="y"}[5m])) / (b:c > 0)', {"a_bucket", "b:c"}),
        ("a == 0 and on (job) sum by (job) (b) == 1", {"a", "b"}),
        ("0.7 * avg_over_time(r:x:rate10m[1d] offset 10m)", {"r:x:rate10m"}),
        ("histogram_quantile(0.5, sum (c))", {"c"}),
    ],
)
def test_names_are_found_in_an_expression(expression: str, names: set[str]) -> None:
    assert metric_names(expression) == names
