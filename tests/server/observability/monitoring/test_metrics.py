"""Metrics page: values, also of steps and stages, documentation and HTTP."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from polling import until
from support.server.nvml import FakeGpu, reader_of
from support.server.pipelines import PROCESS, BranchedModel
from support.server.rig import PATIENCE, ask, has_ipv6, signature, spec

from tensorferry.batcher import Batcher, Pipeline, Stage, StageModel
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.models.lifecycle.model import Model, ModelStep
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.observability.monitoring.http_server import MetricsServer
from tensorferry.server.observability.monitoring.metrics.metrics import Metrics
from tensorferry.server.observability.monitoring.processes import ProcessStatus, ServerStatistics
from tensorferry.server.observability.monitoring.step_statistics import counts_of
from tensorferry.server.python.steps.stage_function import StepTimes
from tensorferry.server.runtime.recovery.instance_health import InstanceEvent
from tensorferry.server.system.addresses import listen_for_metrics

DOCS = Path(__file__).resolve().parents[4] / "docs" / "reference" / "metrics.md"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(gated=True)


@pytest.fixture
def registry(runner: ScriptedRunner) -> Iterator[ModelRegistry]:
    """Registry with the model m of two priority classes. The test releases its batches."""
    registry = ModelRegistry()
    batcher = Batcher(runner, 6, priority_weights=(4, 1), max_queue_size=8)
    registry.mark_ready(
        Model(
            "m", "3", signature(spec("x", "FP32", "b")), 6, "in batches", batcher, devices=("cuda:1", "cpu")
        )
    )
    yield registry
    runner.open()
    assert batcher.close()


SERVER = ServerStatistics(
    "0.1.0",
    "lane",
    ready=True,
    open_streams=2,
    call_threads=7,
    unsent_bytes=9,
    refused={grpc.StatusCode.NOT_FOUND: 3},
    processes=(
        ProcessStatus("server 0", 10, 3, "serving", 2, 500),
        ProcessStatus("server 1", 11, 1, "serving", 0, 40),
        ProcessStatus("server 2", None, 4, "waiting", 3),
    ),
)


def page(registry: ModelRegistry, *gpus: FakeGpu, accept: str = "") -> str:
    """Return the page with readings of these GPUs, which are CUDA devices from 0 on."""
    reader = reader_of(*gpus) if gpus else None
    text, _ = Metrics(registry, lambda: SERVER, lambda: reader).page(accept)
    return text.decode()


# The registry's model runs on the second one.
GPUS = (
    FakeGpu("0000:17:00.0", "GPU-a"),
    FakeGpu("0000:b3:00.0", "GPU-b", busy=40, used=7, total=9, celsius=61, milliwatts=312_500),
)


def samples(text: str) -> Samples:
    """Return the samples as written. The parser would append `_total` to Triton's counters."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            assert match is not None, line
            labels = re.findall(r'(\w+)="([^"]*)"', match[2] or "")
            assert labels == sorted(labels)
            found[match[1], tuple((k, v) for k, v in labels if k not in ("model", "version"))] = float(
                match[3]
            )
    return found


def types(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))


def test_every_metric_is_documented_and_nothing_else_is(registry: ModelRegistry) -> None:
    """Type, labels and the values of labels must be documented too."""
    rows = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    documented = {name: type for name, type, _ in rows}
    branched = BranchedModel(name="m2", processes=(PROCESS,))
    registry.mark_ready(branched.model)
    text = page(registry, *GPUS)
    branched.close()
    served = types(text)
    processes = {name for name in served if name.startswith("process_")}
    assert documented == {name: type for name, type in served.items() if name not in processes}
    events = {event.value for event in InstanceEvent}
    assert processes == set(re.findall(r"`(process_\w+)`", DOCS.read_text())) - events
    about = {name: meaning for name, _, meaning in rows}
    for (sample, labels), _ in samples(text).items():
        name = sample if sample in about else re.sub(r"_(bucket|sum|count)$", "", sample)
        for label, value in labels:
            if "gpu_uuid" in dict(labels):
                continue
            if label != "le":
                assert f"`{label}`" in about[name], name
            if label == "step" or (label == "stage" and "_stage_" in name):
                # The author of the model names them.
                continue
            # Outcomes are documented once.
            where = about["tensorferry_requests_total"] if label == "outcome" else about.get(name, "")
            assert label in ("le", "priority", "release") or f"`{value}`" in where + about[name], (
                name,
                value,
            )


def test_metrics_of_processes(registry: ModelRegistry) -> None:
    found = samples(page(registry))
    assert found["tensorferry_process_restarts_total", ()] == 5
    assert found["tensorferry_processes_resident_bytes", ()] == 540
    for state, count in (("starting", 0), ("serving", 2), ("waiting", 1), ("ended", 0)):
        assert found["tensorferry_processes", (("state", state),)] == count


def test_readiness_of_models(registry: ModelRegistry) -> None:
    registry.mark_loading("late", "1")
    registry.mark_failed("broken", "2", "no such operator")
    text = page(registry)
    for name, version, ready in (("m", 3, 1), ("late", 1, 0), ("broken", 2, 0)):
        assert f'tensorferry_model_ready{{model="{name}",version="{version}"}} {ready}.0\n' in text
    (model,) = registry.models()
    registry.mark_unloading(model)
    assert 'tensorferry_model_ready{model="m",version="3"} 0.0\n' in page(registry)
    registry.mark_unloaded(model)
    assert 'model="m"' not in page(registry)
    # The fixture closes the model's batcher.
    registry.mark_ready(model)


def test_events_of_instances_are_counted(registry: ModelRegistry) -> None:
    (model,) = registry.models()
    for count, event in enumerate(InstanceEvent):
        for _ in range(count):
            model.health.record(event)
    found = samples(page(registry))
    assert {
        dict(labels)["event"]: value
        for (name, labels), value in found.items()
        if name == "tensorferry_instance_events_total"
    } == {event.value: count for count, event in enumerate(InstanceEvent)}


def test_metrics_of_gpus_in_use(registry: ModelRegistry) -> None:
    found = {
        (name, labels): value
        for (name, labels), value in samples(page(registry, *GPUS)).items()
        if "gpu_uuid" in dict(labels)
    }
    expected: Samples = {}
    for name, value in {
        "nv_gpu_utilization": 0.4,
        "nv_gpu_memory_total_bytes": 9,
        "nv_gpu_memory_used_bytes": 7,
        "nv_gpu_power_usage": 312.5,
        "nv_gpu_power_limit": 700,
        "nv_energy_consumption": 0,
    }.items():
        expected[name, (("gpu_uuid", "GPU-b"),)] = value
    for name, value in {
        "utilization_ratio": 0.4,
        "memory_total_bytes": 9,
        "memory_used_bytes": 7,
        "temperature_celsius": 61,
        "power_watts": 312.5,
        "power_limit_watts": 700,
        "energy_joules_total": 0,
    }.items():
        expected[f"tensorferry_gpu_{name}", (("device", "cuda:1"), ("gpu_uuid", "GPU-b"))] = value
    assert found == expected


@pytest.fixture
def branched() -> Iterator[BranchedModel]:
    made = BranchedModel()
    yield made
    made.close()


def samples_of(model: Model) -> dict[str, float]:
    """The samples of a page with one model, by name and labels."""
    registry = ModelRegistry()
    registry.mark_ready(model)
    return {
        name + "".join([f' {label}="{value}"' for label, value in labels]): count
        for (name, labels), count in samples(page(registry)).items()
    }


def test_each_step_has_its_batches_and_seconds(branched: BranchedModel) -> None:
    branched.encode.open()
    for _ in range(3):
        branched.submit().result(PATIENCE)
    found = samples_of(branched.model)
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
    found = until(lambda: samples_of(branched.model), lambda now: now["tensorferry_queued_requests"] == 2)
    assert found["tensorferry_queued_requests"] == 2
    assert found['tensorferry_stage_queued_rows stage="encode"'] == 5
    assert found['tensorferry_stage_queued_rows stage="clean+split"'] == 0
    branched.encode.open()
    for future in futures:
        future.result(PATIENCE)
    found = samples_of(branched.model)
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
        found = samples_of(model)
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
            assert not [name for name in samples_of(model) if "_step_" in name or "_stage_" in name]


class StandIn:
    """What is read of a process."""

    def __init__(self, pid: int | None, restarts: int) -> None:
        self.pid, self.restarts = pid, restarts


def test_the_processes_of_a_function() -> None:
    # No process of Linux has the last id: it has ended since.
    processes: Any = (StandIn(os.getpid(), 2), StandIn(None, 1), StandIn(1 << 23, 0))
    branched = BranchedModel(processes=processes)
    found = samples_of(branched.model)
    branched.close()
    assert found['tensorferry_step_processes step="clean"'] == 2
    assert found['tensorferry_step_process_restarts_total step="clean"'] == 3
    assert found['tensorferry_step_processes_resident_bytes step="clean"'] > 1e6
    assert 'tensorferry_step_processes step="split"' not in found


IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=IPV6)])
def test_the_page_is_served_over_http(host: str) -> None:
    pages = iter([b"one\n", b"two\n"])
    server = MetricsServer(listen_for_metrics(host, 0), lambda accept: (next(pages), f"of {accept!r}"))
    status, headers, body = ask(server.url)
    assert (status, headers["Content-Type"], body) == (200, "of ''", b"one\n")
    assert ask(server.url, "/metrics?what=ever")[2] == b"two\n"
    server.close()
