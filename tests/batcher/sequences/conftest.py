"""Stateful batchers that are closed at the end of a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.batcher.stateful import TOTAL, Make, running_total

from tensorferry.batcher import (
    StatefulBatcher,
)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[StatefulBatcher] = []

    def make_batcher(model_fn: Any = running_total, **options: Any) -> StatefulBatcher:
        made.append(StatefulBatcher(model_fn, options.pop("states", [TOTAL]), **options))
        return made[-1]

    yield make_batcher
    for batcher in made:
        assert batcher.close(drain=False), "a thread did not end"
