"""Metrics of steps and stages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from polling import until
from support.server.pipelines import BranchedModel
from support.server.rig import PATIENCE, signature, spec

from tensorferry.batcher import Batcher, Pipeline, Stage, StageModel
from tensorferry.server.models.lifecycle.registry import Model, ModelRegistry, ModelStep
from tensorferry.server.observability.monitoring.metrics.metrics import Metrics, ServerStatistics
from tensorferry.server.observability.monitoring.step_statistics import counts_of
from tensorferry.server.python.steps.stage_function import StepTimes

SERVER = ServerStatistics("0.1.0", "lane", ready=True)


@pytest.fixture
def branched() -> Iterator[BranchedModel]:
    made = BranchedModel()
    yield made
    made.close()


def samples(model: Model) -> dict[str, float]:
    """The metrics of a model by name and labels, without its own labels."""
    registry = ModelRegistry()
    registry.mark_ready(model)
    text = Metrics(registry, lambda: SERVER).page()[0].decode()
    found = {}
    for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        if f'model="{model.name}"' in labels and f'version="{model.version}"' in labels:
            kept = [one for one in labels.split(",") if not one.startswith(("model=", "version="))]
            found[name + "".join(f" {one}" for one in kept)] = float(value)
    return found


def test_each_step_has_its_batches_and_seconds(branched: BranchedModel) -> None:
    branched.encode.open()
    for _ in range(3):
        branched.submit().result(PATIENCE)
    found = samples(branched.model)
    for step in ("clean", "split", "encode", "count"):
        assert found[f'tensorferry_step_batches_total step="{step}"'] == 3
        assert found[f'tensorferry_step_seconds_total step="{step}"'] > 0
    # The whole of a stage of two steps is that of its steps.
    whole = branched.batchers["clean+split"].statistics().compute_time_sum
    assert sum(found[f'tensorferry_step_seconds_total step="{step}"'] for step in ("clean", "split")) <= whole
    # A stage of one step has no other time than its own.
    assert (
        found['tensorferry_step_seconds_total step="encode"']
        == branched.batchers["encode"].statistics().compute_time_sum
    )


def test_each_stage_has_its_queue_and_batches(branched: BranchedModel) -> None:
    futures = [branched.submit(1)]
    branched.encode.await_batches(1)
    futures += [branched.submit(rows) for rows in (2, 3)]
    until(lambda: branched.batchers["encode"].statistics().sizes.queued_rows, lambda rows: rows == 5)
    # The stage beside it may still have them, too.
    found = until(lambda: samples(branched.model), lambda now: now["tensorferry_queued_requests"] == 2)
    assert found["tensorferry_queued_requests"] == 2
    assert found['tensorferry_stage_queued_rows stage="encode"'] == 5
    assert found['tensorferry_stage_queued_rows stage="clean+split"'] == 0
    branched.encode.open()
    for future in futures:
        future.result(PATIENCE)
    found = samples(branched.model)
    assert found['tensorferry_stage_queued_rows stage="encode"'] == 0
    assert found['tensorferry_stage_batch_rows_sum stage="encode"'] == 6
    assert found['tensorferry_stage_batch_rows_count stage="encode"'] == 3
    assert found['tensorferry_stage_batch_rows_bucket le="2.0" stage="encode"'] == 2
    assert 'tensorferry_stage_batch_rows_bucket le="8.0" stage="encode"' not in found, "it has at most 4 rows"
    assert found['tensorferry_stage_queue_delay_seconds_count stage="encode"'] == 3
    delay = found['tensorferry_stage_queue_delay_seconds_sum stage="encode"']
    assert 0 < delay < found['tensorferry_stage_request_seconds_total stage="encode"']
    assert found['tensorferry_stage_requests_total outcome="answered" stage="count"'] == 3


def test_a_model_of_one_function_has_a_step_and_no_stage() -> None:
    step = ModelStep("f", "python", "f", {"x": "x"}, {"y": "y"}, (StepTimes(),))
    with Batcher(lambda x: x, 4) as batcher:
        model = Model("f", "1", signature(spec("x", "FP64", "b")), 4, "", batcher, steps=(step,))
        batcher.submit(np.zeros(1)).result(PATIENCE)
        found = samples(model)
        assert found['tensorferry_step_batches_total step="f"'] == 1
        assert found['tensorferry_step_seconds_total step="f"'] > 0
        assert not [name for name in found if "_stage_" in name]


def test_steps_of_other_models_are_counted_there_alone() -> None:
    with Batcher(lambda inputs: {"y": inputs["x"]}, 4) as other:
        stage = Stage("other", lambda: StageModel(other), {"x": "x"}, {"y": "y"})
        with Pipeline("p", [stage], inputs=["x"], outputs=["y"]) as pipeline:
            step = ModelStep("other", "model", "other", {"x": "x"}, {"y": "y"})
            model = Model("p", "1", signature(spec("x", "FP64", "b")), 4, "", pipeline, steps=(step,))
            pipeline.submit({"x": np.zeros(())}).result(PATIENCE)
            counts = counts_of(model)
            assert (list(counts.steps()), counts.stages, counts.counts.answered) == ([], [], 1)
            assert not [name for name in samples(model) if "_step_" in name or "_stage_" in name]


class StandIn:
    """What is read of a process."""

    def __init__(self, pid: int | None, restarts: int) -> None:
        self.pid, self.restarts = pid, restarts


def test_the_processes_of_a_function() -> None:
    processes: Any = (StandIn(os.getpid(), 2), StandIn(None, 1))
    branched = BranchedModel(processes=processes)
    found = samples(branched.model)
    branched.close()
    assert found['tensorferry_step_processes step="clean"'] == 1
    assert found['tensorferry_step_process_restarts_total step="clean"'] == 3
    assert found['tensorferry_step_processes_resident_bytes step="clean"'] > 1e6
    assert 'tensorferry_step_processes step="split"' not in found
