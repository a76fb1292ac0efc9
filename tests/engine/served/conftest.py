"""One server of the embedded default for all tests of this folder; the last one ends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.server_process import Served, serving


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), "--slo-ttft-ms", "60000") as server:
        yield server
