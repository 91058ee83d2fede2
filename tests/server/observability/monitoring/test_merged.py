"""Metrics page, ModelStatistics and status of several processes as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.server.nvml import FakeGpu, reader_of
from support.server.pipelines import PROCESS, BranchedModel
from support.server.rig import PATIENCE, signature, spec

from tensorferry.batcher import Batcher, RequestTooLarge
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.observability.logs.exemplars import Exemplars
from tensorferry.server.observability.monitoring.merged import joined_page, labelled_page, merged_status
from tensorferry.server.observability.monitoring.metrics.metrics import Metrics
from tensorferry.server.observability.monitoring.processes import ProcessStatus, ServerStatistics
from tensorferry.server.observability.monitoring.status_report import MAX_BATCHES, StatusReport

TEXT, OPENMETRICS = "", "application/openmetrics-text"
FORMATS = pytest.mark.parametrize("accept", [TEXT, OPENMETRICS])
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


class Process:
    """A whole server: the model m of two priority classes on cuda:0, and the pipeline p. The test releases batches of m."""

    def __init__(self, gpu: FakeGpu | None = None) -> None:
        self.registry = ModelRegistry()
        self.runner = ScriptedRunner(gated=True)
        self.exemplars = Exemplars()
        self.batcher = Batcher(self.runner, 6, priority_weights=(4, 1), max_queue_size=8)
        self.pipeline = BranchedModel(gated=False, processes=(PROCESS,))
        m = Model(
            "m",
            "3",
            signature(spec("x", "FP32", "b")),
            6,
            "in batches",
            self.batcher,
            devices=("cuda:0",),
            exemplars=self.exemplars,
        )
        self.registry.mark_ready(m)
        self.registry.mark_ready(self.pipeline.model)
        self.registry.mark_complete()
        self.service = InferenceService(self.registry)
        processes = (
            ProcessStatus("process 0", 10, 3, "serving", 2, 500),
            ProcessStatus("process 1", None, 1, "ended", 1),
        )
        server = ServerStatistics(
            "0.1.0", "lane", True, 2, 7, 9, {grpc.StatusCode.NOT_FOUND: 3}, processes=processes
        )
        self.report = StatusReport(
            self.registry, self.service, ServerConfig(()), lambda: "127.0.0.1:1", lambda: server
        ).report
        reader = None if gpu is None else reader_of(gpu, places=[gpu.bus_id] * 2)
        self._metrics = Metrics(self.registry, lambda: server, lambda: reader)

    def page(self, accept: str = TEXT) -> bytes:
        return self._metrics.page(accept)[0]

    def serve(self, requests: int) -> None:
        """Answer requests of one row each to m, in as many batches, and to p, and refuse another to m."""
        self.batcher.last_batches()
        self.runner.open()
        for _ in range(requests):
            self.batcher.submit(1.0, tag="of m").result(PATIENCE)
            self.pipeline.submit().result(PATIENCE)
        with pytest.raises(RequestTooLarge):
            self.batcher.submit_rows(np.zeros(9))

    def close(self) -> None:
        self.runner.open()
        assert self.batcher.close()
        self.pipeline.close()


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Process] = []

    def make(**options: Any) -> Process:
        started.append(Process(**options))
        return started[-1]

    yield make
    for process in started:
        process.close()


def samples(page: bytes, accept: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    parse = parse_openmetrics if accept else parse_text
    found = {}
    for family in parse(page.decode()):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, "each series occurs once"
            found[key] = sample.value
    return found


@FORMATS
def test_the_page_has_the_series_of_each_process_with_its_number(start: Start, accept: str) -> None:
    pages = []
    for requests in (1, 3):
        process = start(gpu=FakeGpu("0000:17:00.0", "GPU-a"))
        process.exemplars.record(TRACE, 0.002)
        process.serve(requests)
        pages.append(process.page(accept))
    whole = joined_page([labelled_page(page, number) for number, page in enumerate(pages)])
    found = samples(whole, accept)
    of_all = (
        "tensorferry_processes",
        "tensorferry_process_restarts_total",
        "tensorferry_processes_resident_bytes",
    )
    expected = {}
    for number, page in enumerate(pages):
        for (name, labels), value in samples(page, accept).items():
            own = () if name in of_all else (("process", str(number)),)
            expected[name, tuple(sorted((*labels, *own)))] = value
    assert found == expected
    assert len([line for line in whole.splitlines() if line.startswith(b"# TYPE")]) == len(
        [line for line in pages[0].splitlines() if line.startswith(b"# TYPE")]
    )


def test_labels_may_have_any_text() -> None:
    page = b'# TYPE m gauge\nm{model="a } b\\" # {x=\\"1\\"}\xe2\x80\xa8"} 1\nm 2\n'
    found = samples(labelled_page(page, 7), TEXT)
    assert {labels[-1] for _, labels in found} == {("process", "7")}
    assert len(found) == 2


def test_status_of_several_processes(start: Start) -> None:
    processes = [start(), start(), start()]
    for requests, process in enumerate(processes, start=1):
        process.serve(requests)
    reports = [process.report() for process in processes]
    whole = merged_status(reports)
    uptimes = [report["server"]["uptime_seconds"] for report in reports]
    assert whole["server"] == reports[0]["server"] | {"uptime_seconds": max(uptimes)}
    assert whole["now_seconds"] == max(report["now_seconds"] for report in reports)
    m, p = whole["models"]
    parts = [report["models"][0] for report in reports]
    assert (m["name"], m["version"], m["state"], m["inputs"]) == ("m", "3", "READY", parts[0]["inputs"])
    assert m["requests"]["answered"] == 6
    assert m["refusals"] == {"too_large": 3}
    for which in ("queue", "compute", "total"):
        assert list(m["times"][which]) == np.sum([part["times"][which] for part in parts], axis=0).tolist()
    assert m["answer_seconds"]["compute"] == sum(part["answer_seconds"]["compute"] for part in parts)
    assert m["batches"]["by_rows"] == {"1": 6}
    assert (m["batches"]["ran"], sum(m["batches"]["by_reason"].values())) == (6, 6)
    assert m["settings"] == parts[0]["settings"] | {"devices": ["cuda:0"] * 3}

    # Each step and stage of the pipeline is counted as the model is.
    assert [(step["name"], step["ran"], len(step["processes"])) for step in p["steps"]] == [
        ("clean", 6, 3),
        ("split", 6, 0),
        ("encode", 6, 0),
        ("count", 6, 0),
    ]
    encode = p["stages"][1]
    assert (encode["name"], encode["model"], encode["devices"]) == ("encode", None, ["cuda:1"] * 3)
    assert encode["batches"]["rows"] == 6
    assert sorted(batch["instance"] for batch in encode["last_batches"]) == [0, 1, 1, 2, 2, 2]
    assert p["settings"]["devices"] == ["cpu", "cuda:1", "cpu"] * 3


def test_the_counts_of_caches_are_summed(start: Start) -> None:
    reports = [start().report(), start().report()]
    for hits, report in enumerate(reports, start=1):
        report["models"][0]["cache"] = {"hits": hits, "hit_seconds": 0.5, "nbytes": 100}
    m, p = merged_status(reports)["models"]
    assert m["cache"] == {"hits": 3, "hit_seconds": 1.0, "nbytes": 200}
    assert p["cache"] == {}


def test_the_last_batches_are_the_newest_of_all_processes(start: Start) -> None:
    one, other = start(), start()
    for process in (one, other, one):
        process.batcher.last_batches()
        process.runner.open()
        for _ in range(20):
            process.batcher.submit(1.0).result(PATIENCE)
    (batches,) = [
        each["last_batches"] for each in merged_status([one.report(), other.report()])["models"][:1]
    ]
    assert len(batches) == MAX_BATCHES
    assert [(batch["instance"], batch["number"]) for batch in batches] == [
        *((1, number) for number in range(9, 21)),
        *((0, number) for number in range(21, 41)),
    ]


def test_readiness_and_problems_are_those_of_any_process(start: Start) -> None:
    processes = [start(), start(), start()]
    assert merged_status([process.report() for process in processes])["ready"]
    processes[0].registry.mark_failed("n", "1", "its file is gone")
    processes[1].service.begin_drain()
    processes[1].registry.mark_failed("n", "1", "its file is gone")
    (m, _) = processes[2].registry.models()
    processes[2].registry.mark_unloading(m)
    processes[2].registry.mark_loading("late", "1")
    whole = merged_status([process.report() for process in processes])
    assert (whole["ready"], whole["draining"]) == (False, True)
    assert whole["problems"] == [
        "model n version 1 is UNAVAILABLE: its file is gone",
        "the server is draining",
        "model late version 1 is LOADING",
        "model m version 3 is UNLOADING",
    ]
    assert [(one["name"], one["state"], one["reason"], "requests" in one) for one in whole["models"]] == [
        ("m", "UNLOADING", "", True),
        ("n", "UNAVAILABLE", "its file is gone", False),
        ("p", "READY", "", True),
        ("late", "LOADING", "", False),
    ]
