from pathlib import Path

import pytest

from server.settings import settings_table, speculative_table

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize("table", [settings_table(), speculative_table()], ids=["settings", "speculative_config"])
def test_the_readme_lists_every_setting(table: str) -> None:
    assert table in README
