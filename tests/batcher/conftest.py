from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.batcher.rig import occupy

from tensorferry.batcher import Batcher
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

Make = Callable[..., Batcher]
Busy = Callable[..., tuple[Batcher, ScriptedRunner]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make batchers that are closed after the test, after opening their runners' gates."""
    made: list[tuple[Any, Batcher]] = []

    def make_batcher(model_fn: Any, *args: Any, **options: Any) -> Batcher:
        batcher = Batcher(model_fn, *args, **options)
        made.append((model_fn, batcher))
        return batcher

    yield make_batcher
    for model_fn, batcher in made:
        if isinstance(model_fn, ScriptedRunner):
            model_fn.open()
        assert batcher.close(), "a worker did not end"


@pytest.fixture
def busy(make: Make) -> Busy:
    """Make batchers whose worker is busy with a first batch: what is queued runs when the test opens the runner."""

    def make_busy(model_fn: Callable[[Any], Any] | None = None, *args: Any, **options: Any) -> Any:
        runner = ScriptedRunner(model_fn, gated=True)
        batcher = make(runner, *args, **options)
        occupy(batcher, runner)
        return batcher, runner

    return make_busy


@pytest.fixture
def runner() -> ScriptedRunner:
    """A runner that doubles its input when the test releases it."""
    return ScriptedRunner(gated=True)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
