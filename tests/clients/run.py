"""Run clients that others wrote against a server with the embedded model, and print what passed.

Usage: python -m tests.clients.run [CLIENT ...]; every folder beside this file that holds a checks.py, or a checks.mjs for Node, is a
client. Each has its own environment under .venv-clients, made from its requirements.lock or package-lock.json; one without a lock runs in
the server's. CONFORMANCE_URL, _KEY, _MODEL and _FOLDER name a running server in place of one that is started here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.starter import end_of, started

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
START_SECONDS = 300
END_SECONDS = 60
CLIENT_SECONDS = 1800
KEY = "sk-conformance"
NAME = "SmolLM2-135M-Instruct"


@dataclass
class Outcome:
    """Checks of one client. What ended without a result of its own counts as failed; `skipped` says why nothing could run."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: str | None = None


class NoNodeError(Exception):
    """Node or its npm is not installed."""


def main(names: Sequence[str]) -> int:
    """Run the clients of these names, or all; 0 if everything passed."""
    known = sorted(path.parent.name for path in HERE.glob("*/checks.*"))
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no such client: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="minedraft-clients-") as scratch, server(Path(scratch)) as where:
        for name in names or known:
            print(f"== {name}", flush=True)
            outcomes[name] = run(name, where, Path(scratch))
    report(outcomes)
    return any(outcome.failed or outcome.skipped for outcome in outcomes.values())


def run(name: str, where: dict[str, str], scratch: Path) -> Outcome:
    """The checks of one client."""
    outcome = Outcome()
    try:
        command = node_checks(name) if (HERE / name / "checks.mjs").exists() else python_checks(name)
    except subprocess.CalledProcessError as error:
        outcome.skipped = f"its environment could not be made: {error.stderr.strip()[-1000:]}"
        return outcome
    except NoNodeError:
        outcome.skipped = "node and npm are not on the PATH"
        return outcome
    folder = scratch / name
    folder.mkdir()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **where, "PYTHONPATH": str(HERE), "CONFORMANCE_SCRATCH": str(folder), "PYTHONWARNINGS": "ignore"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith('{"check"'):
            print(line, end="", flush=True)
            continue
        result = json.loads(line)
        print(f"{result['result']}: {result['check']}", flush=True)
        if result["result"] == "passed":
            outcome.passed.append(result["check"])
        else:
            outcome.failed[result["check"]] = result["reason"]
    # Node's test runner ends with 1 where a check failed; that check is reported already.
    if (process.wait(CLIENT_SECONDS) and not outcome.failed) or not (outcome.passed or outcome.failed):
        outcome.failed["the script"] = f"it ended with {process.returncode}"
    return outcome


def python_checks(name: str) -> list[str]:
    """The command that runs checks.py in the client's own environment, which is made anew where the lock has changed."""
    script = str(HERE / name / "checks.py")
    lock = HERE / name / "requirements.lock"
    if not lock.exists():
        return [sys.executable, script]
    folder = ENVIRONMENTS / name
    note = folder / lock_note(lock)
    python = folder / "bin" / "python"
    if not note.exists():
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        commands = [[sys.executable, "-m", "venv", "--clear", str(folder)], [*install, "-r", str(lock)]]
        if torch := [line for line in lock.read_text().splitlines() if line.startswith("torch==")]:
            # Without CUDA, which takes gigabytes; on its own, so that a page that cannot be reached costs one attempt.
            page = re.search(r'torch_page="(.*)"', (ROOT / ".ci" / "setup").read_text())
            assert page is not None
            commands.insert(1, [*install, "--retries", "1", "--find-links", page[1], *torch])
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True)
        note.touch()
    return [str(python), script]


def node_checks(name: str) -> list[str]:
    """The command that runs checks.mjs in the client's own environment. Raises NoNodeError.

    Node finds packages from a script's folder upwards, so the checks are copied to where theirs are installed.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise NoNodeError
    folder = ENVIRONMENTS / name
    note = folder / lock_note(HERE / name / "package-lock.json")
    made = note.exists()
    if not made:
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE / name, folder, dirs_exist_ok=True)
    if not made:
        install = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--engine-strict"]
        subprocess.run(install, cwd=folder, check=True, capture_output=True, text=True)
        note.touch()
    return [node, "--test-reporter", str(HERE / "reporter.mjs"), str(folder / "checks.mjs")]


def lock_note(lock: Path) -> str:
    """The name of the file that tells an environment was made from this lock."""
    return f".lock-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"


@contextmanager
def server(scratch: Path) -> Iterator[dict[str, str]]:
    """Where a server runs, as the environment of the checks: the one that is named, or one started for the time being."""
    if "CONFORMANCE_URL" in os.environ:
        yield {name: os.environ[name] for name in ("CONFORMANCE_URL", "CONFORMANCE_KEY", "CONFORMANCE_MODEL", "CONFORMANCE_FOLDER")}
        return
    log = scratch / "server.log"
    command = [
        sys.executable, "-m", "server.cli", "serve", "--api-key", KEY, "--no-access-log",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ]  # fmt: skip
    with started(command, log, START_SECONDS) as (url, process):
        yield {"CONFORMANCE_URL": url, "CONFORMANCE_KEY": KEY, "CONFORMANCE_MODEL": NAME, "CONFORMANCE_FOLDER": model_folder(url)}
        if process.poll() is not None:
            raise RuntimeError(f"the server ended while clients talked to it: {end_of(log)}")
        process.terminate()
        process.wait(END_SECONDS)


def model_folder(url: str) -> str:
    """The folder that the server names as its model's root."""
    request = urllib.request.Request(f"{url}/v1/models/{NAME}", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["root"])


def report(outcomes: dict[str, Outcome]) -> None:
    """Print the failures, then one line for each client."""
    for name, outcome in outcomes.items():
        for check, reason in outcome.failed.items():
            print(f"FAILED {name}: {check}: {reason[:2000]}")
        if outcome.skipped:
            print(f"SKIPPED {name}: {outcome.skipped}")
    print(f"{'client':<14}{'passed':>8}{'failed':>8}{'skipped':>9}")
    for name, outcome in outcomes.items():
        print(f"{name:<14}{len(outcome.passed):>8}{len(outcome.failed):>8}{'all' if outcome.skipped else 0:>9}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
