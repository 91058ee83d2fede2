from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.batcher.pipelines import Puppets

from tensorferry.batcher.testing import VirtualClock


@pytest.fixture
def puppets(clock: VirtualClock) -> Iterator[Puppets]:
    made = Puppets(clock)
    yield made
    made.close()
