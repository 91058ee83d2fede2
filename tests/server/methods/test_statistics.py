"""ModelStatistics: which models it reports, and that the figures are the batcher's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.server.rig import PATIENCE, signature, spec

from tensorferry.batcher import Batcher, DeadlineExceeded
from tensorferry.batcher.testing import VirtualClock
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.methods.statistics import StatisticsMethods
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry

Ready = Callable[..., Model]


@pytest.fixture
def registry() -> ModelRegistry:
    return ModelRegistry()


@pytest.fixture
def ready(registry: ModelRegistry) -> Iterator[Ready]:
    """Make models ready. Their batchers are closed after the test."""
    made: list[Batcher] = []

    def make(name: str, version: str = "1", model_fn: Any = lambda x: x, **options: Any) -> Model:
        batcher = Batcher(model_fn, 8, **options)
        made.append(batcher)
        model = Model(name, version, signature(spec("x", "FP32", "b")), 8, "in batches", batcher)
        registry.mark_ready(model)
        return model

    yield make
    for batcher in made:
        assert batcher.close()


def statistics(registry: ModelRegistry, name: str = "", version: str = "") -> list[pb.ModelStatistics]:
    request = pb.ModelStatisticsRequest(name=name, version=version)
    response = StatisticsMethods(registry).methods()["ModelStatistics"](request)
    return list(response.model_stats)


def test_the_figures(registry: ModelRegistry, ready: Ready) -> None:
    clock = VirtualClock()

    def model_fn(x: Any) -> Any:
        clock.advance(0.5)
        if (x < 0).any():
            raise ValueError("negative")
        return x

    batcher = ready("m", model_fn=model_fn, clock=clock).batcher
    for rows in (2, 2, 3, 20):
        batcher.submit_rows(np.zeros(rows)).result(PATIENCE)
    assert isinstance(batcher.submit_rows([-1.0]).exception(PATIENCE), ValueError)
    with pytest.raises(DeadlineExceeded):
        batcher.submit(0.0, timeout=0.0)
    assert batcher.drain()
    (one,) = statistics(registry)
    assert (one.inference_count, one.execution_count) == (27, 6)

    def duration(count: int, seconds: float) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=count, ns=round(seconds * 1e9))

    assert one.inference_stats == pb.InferStatistics(
        success=duration(4, 3.0),
        fail=duration(2, 0.5),
        # The split request waits for two batches before its last part runs.
        queue=duration(4, 1.0),
        compute_input=duration(4, 0),
        compute_infer=duration(4, 2.0),
        compute_output=duration(4, 0),
    )
    batches = {batch.batch_size: batch for batch in one.batch_stats}
    assert list(batches) == [2, 3, 4, 8]
    for size, count in {2: 2, 3: 1, 4: 1, 8: 2}.items():
        assert batches[size].compute_infer == duration(count, 0.5 * count)
        assert batches[size].compute_input == batches[size].compute_output == duration(count, 0)
    assert not one.response_stats


def test_the_time_of_the_last_inference(
    registry: ModelRegistry, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is by the system's clock, and stays the same until the next batch if that clock is corrected."""
    clock = VirtualClock(start=100.0)
    wall = [50_000.0]
    times = SimpleNamespace(monotonic=clock.now, time=lambda: wall[0])
    monkeypatch.setattr("tensorferry.server.methods.statistics.time", times)
    batcher = ready("m", clock=clock).batcher
    extension = StatisticsMethods(registry)

    def last() -> int:
        (one,) = extension.model_statistics(pb.ModelStatisticsRequest()).model_stats
        return one.last_inference

    assert last() == 0
    batcher.submit(0.0).result(PATIENCE)
    clock.advance(2.0)
    assert last() == 49_998_000
    wall[0] = 7.0
    assert last() == 49_998_000
    batcher.submit(0.0).result(PATIENCE)
    assert last() == 7_000
