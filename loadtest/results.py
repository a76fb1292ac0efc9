"""The file that a load test leaves, and its few lines on the terminal."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from loadtest.figures import DEFINITIONS, Figures, Spread
from loadtest.plan import Plan
from loadtest.sample import Sample
from minedraft_core.config import ConfigError

_METRICS = {
    "TTFT ms": "ttft_ms",
    "TPOT ms": "tpot_ms",
    "ITL ms": "itl_ms",
    "E2E ms": "e2e_ms",
    "tok/s of a request": "request_tokens_per_second",
}


class Results(msgspec.Struct, frozen=True):
    """What `--results` writes. `faults` says what was not kept; `warnings` what makes the figures doubtful."""

    label: str
    host: str
    written: str
    users: int
    versions: dict[str, str]
    plan: Plan
    definitions: dict[str, str]
    figures: Figures
    faults: list[str]
    warnings: list[str]

    def write(self, path: Path) -> None:
        """Write the file, indented."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def make_results(plan: Plan, host: str, users: int, figures: Figures, faults: list[str], *, overloaded: bool) -> Results:
    """The results of a test that ended now."""
    warnings = []
    if overloaded:
        warnings.append("the load generator had no CPU to spare, so its times are too long: start several, each on a core of its own")
    if figures.cut:
        warnings.append(f"{figures.cut} requests were cut short by the end of the test: raise --stop-timeout")
    return Results(
        label=plan.label or f"{users} users",
        host=host,
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        users=users,
        versions={"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in ("minedraft", "locust")}},
        plan=plan,
        definitions=DEFINITIONS,
        figures=figures,
        faults=faults,
        warnings=warnings,
    )


def read_results(path: Path) -> Results:
    """The results in a file. Raises ConfigError for a file that holds none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} holds no results of a load test: {error}; give a file that --results wrote") from None


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """One JSON object a line for each counted request."""
    path.write_bytes(msgspec.json.Encoder().encode_lines(list(samples)))


def lines_of(results: Results) -> list[str]:
    """The results in a few lines."""
    figures = results.figures
    found = [
        f"{figures.done} requests done, {figures.failed} failed, {figures.aborted} aborted, {figures.cut} cut short",
        f"{figures.duration_s:.1f} s, {figures.requests_per_second:.2f} requests/s, {figures.tokens_per_second:.1f} tokens/s",
    ]
    for title, name in _METRICS.items():
        spread: Spread | None = getattr(figures, name)
        if spread is not None:
            parts = (f"{name} {getattr(spread, name):9.1f}" for name in ("mean", "p50", "p90", "p95", "p99"))
            found.append(f"{title:<19} {'  '.join(parts)}")
    if figures.slo:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in figures.slo.items())
        good = figures.goodput
        found.append(f"kept: {shares}; goodput {good.requests_per_second:.2f} requests/s, {good.tokens_per_second:.1f} tokens/s")
    found += [f"warning: {warning}" for warning in results.warnings]
    found += [f"not kept: {fault}" for fault in results.faults] or ["all demands kept"]
    return found
