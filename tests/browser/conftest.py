from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.chromium import Chromium


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Chromium]:
    """A browser, whose pages must have logged nothing and have had no errors at the end."""
    chromium = Chromium(tmp_path / "profile")
    chromium.window(1280, 900)
    yield chromium
    console, errors = chromium.console, chromium.errors
    chromium.close()
    assert not console
    assert not errors
