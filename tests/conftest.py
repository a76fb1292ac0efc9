"""Tests of engines run beside the others (`-n 2`), and one after the other: each keeps more than one core busy."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class BesideEngines(LoadScopeScheduling):
    """One worker gets the tests of engines, another one all others."""

    def _split_scope(self, nodeid: str) -> str:
        return "engine" if nodeid.startswith("tests/engine/") else "other"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> BesideEngines:
    return BesideEngines(config, log)
