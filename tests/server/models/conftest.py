from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models.declared import Load, loading
from support.models.served_repository import ServedRepository


@pytest.fixture
def served_repository(tmp_path: Path) -> Iterator[ServedRepository]:
    """An empty repository with a server, which the test starts."""
    (tmp_path / "models").mkdir()
    served = ServedRepository(tmp_path / "models")
    yield served
    served.close()


@pytest.fixture
def load_declared(tmp_path: Path) -> Iterator[Load]:
    """Load what an app.py in the test's directory declares."""
    with loading(tmp_path) as load:
        yield load
