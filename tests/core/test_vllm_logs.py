"""Which of vLLM's lines a user sees."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from minedraft_core.vllm.logs import TellingLines, quieten

PROGRAM = """
from vllm.config import LoggingConfig
from vllm.logger import configure_logging, init_logger
configure_logging(LoggingConfig())
logger = init_logger("vllm.config.vllm")
logger.info("Loading")
logger.warning("Enforce eager set, disabling torch.compile")
logger.warning("Preempted %s times", 3)
logger.error("Enforce eager set, and it failed")
"""


@pytest.mark.parametrize(
    ("name", "level", "message", "passes"),
    [
        ("vllm.v1.worker.cpu_worker", logging.WARNING, "libiomp is not found in LD_PRELOAD. For best performance", False),
        ("vllm.v1.worker.cpu_worker", logging.WARNING, "libtcmalloc is not found in LD_PRELOAD. For best performance", True),
        ("vllm.config.scheduler", logging.WARNING, "Using custom scheduler class own.Scheduler.", True),
        ("vllm.config.vllm", logging.ERROR, "Enforce eager set", True),
        ("minedraft.server", logging.WARNING, "Enforce eager set", True),
    ],
)
def test_only_known_warnings_are_left_out(name: str, level: int, message: str, passes: bool) -> None:
    assert TellingLines().filter(logging.LogRecord(name, level, "", 0, message, None, None)) is passes


def test_vllm_logs_what_tells_something() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    quieten(environment, on_cpu=True)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=110, env=environment)
    assert "Preempted 3 times" in done.stderr
    assert "and it failed" in done.stderr
    assert "disabling torch.compile" not in done.stderr + done.stdout
    assert "Loading" not in done.stderr + done.stdout


@pytest.mark.parametrize("own", [{"VLLM_LOGGING_LEVEL": "INFO"}, {"VLLM_LOGGING_CONFIG_PATH": "own.json"}, {"VLLM_CONFIGURE_LOGGING": "0"}])
def test_what_the_user_chose_stays(own: dict[str, str]) -> None:
    environment = dict(own)
    quieten(environment, on_cpu=True)
    assert environment == {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "WARNING"} | own


def test_on_gpus_every_warning_is_logged() -> None:
    environment: dict[str, str] = {}
    quieten(environment, on_cpu=False)
    assert environment == {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "WARNING"}
