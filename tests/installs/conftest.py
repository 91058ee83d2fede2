from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (built,) = dist.glob("*.whl")
    return built
