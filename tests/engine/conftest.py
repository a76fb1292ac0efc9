"""Prompts, references and engines that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.harness import Engine, engine
from tests.engine.workload import Results, prompts, run_workload


@pytest.fixture(scope="session")
def reference() -> Results:
    """What the target alone delivers, in float32."""
    with engine("off") as alone:
        return run_workload(alone, prompts())


@pytest.fixture(scope="module")
def speculating() -> Iterator[Engine]:
    """An engine with a drafter; tests change its mode."""
    with engine("sequential", block_size=32) as started:
        yield started
