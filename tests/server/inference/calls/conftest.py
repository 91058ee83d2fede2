"""Models that call each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.server.calling_models import World


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()
