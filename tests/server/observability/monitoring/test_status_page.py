"""Routes for health, the status page and its data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from support.server.pipelines import PROCESS, BranchedModel
from support.server.rig import PATIENCE, ask, signature, spec

from tensorferry.batcher import Batcher, QueueFull, QueuePolicy, StatefulBatcher, StateTensor
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.observability.monitoring.http_server import HttpResponse, MetricsServer
from tensorferry.server.observability.monitoring.processes import ProcessStatus, ServerStatistics
from tensorferry.server.observability.monitoring.status_page import content_security_policy, routes_of
from tensorferry.server.observability.monitoring.status_report import StatusReport
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.server.system.addresses import listen_for_metrics

DOCS = Path(__file__).resolve().parents[4] / "docs" / "reference" / "status.md"

# Text that a model's error or a request's id may contain.
HOSTILE = "</script><script>alert(1)</script>\x1b[31m\r\nX-Injected: yes \ud800 ☃"


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(gated=True)


PROCESSES = (
    ProcessStatus("server 0", 10, 1, "serving", 0, 500),
    ProcessStatus("server 1", None, 3, "waiting", 2),
)
SERVER = ServerStatistics("0.1.0", "lane", ready=True, processes=PROCESSES)


class ServedRoutes:
    """Served routes, and the objects behind them."""

    def __init__(self, registry: ModelRegistry) -> None:
        self.registry = registry
        self.service = InferenceService(registry)
        self.report = StatusReport(
            registry, self.service, ServerConfig(()), lambda: "127.0.0.1:1", lambda: SERVER
        )
        self.server = MetricsServer(
            listen_for_metrics("127.0.0.1", 0),
            lambda accept: (b"page\n", "text/x"),
            routes_of(self.report, self.report.report),
        )

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
        return ask(self.server.url, path, method, **headers)

    def status(self) -> Any:
        status, headers, body = self.ask("/status.json")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        return json.loads(body)


@pytest.fixture
def registry() -> ModelRegistry:
    return ModelRegistry()


@pytest.fixture
def served(registry: ModelRegistry) -> Iterator[ServedRoutes]:
    served = ServedRoutes(registry)
    yield served
    served.server.close()


@pytest.fixture
def model(registry: ModelRegistry, runner: ScriptedRunner) -> Iterator[Model]:
    """Model m of two priority classes. The test releases its batches."""
    batcher = Batcher(
        runner,
        6,
        0.0,
        priority_weights=(1, 1),
        strict_priorities=True,
        policies=(QueuePolicy(timeout=60.0, max_requests=7), QueuePolicy()),
        max_queue_size=8,
    )
    model = Model(
        "m",
        "3",
        signature(spec("x", "FP32", "batch", 4), outputs=(spec("y", "INT64", "batch"),)),
        6,
        "batches of up to 6 rows (proved)",
        batcher,
        slo=0.5,
        devices=("cuda:1",),
        batching_verdict="proved",
    )
    registry.mark_ready(model)
    registry.mark_complete()
    yield model
    runner.open()
    assert batcher.close()


def test_readyz_agrees_with_server_ready_and_grpc_health(
    served: ServedRoutes, registry: ModelRegistry, runner: ScriptedRunner
) -> None:
    def readiness() -> tuple[int, list[str]]:
        status, headers, body = served.ask("/readyz")
        assert headers["Content-Type"] == "text/plain; charset=utf-8"
        assert (status == 200) == served.service.ready
        return status, body.decode().splitlines()

    assert readiness() == (503, ["not ready", "models are still being loaded"])
    registry.mark_loading("m", "1")
    assert readiness()[1][2:] == ["model m version 1 is LOADING"]
    health = InstanceHealth("m", "1", changed=registry.health_changed)
    with Batcher(runner, 4) as batcher:
        registry.mark_ready(Model("m", "1", signature(spec("x", "FP32", "b")), 4, "", batcher, health=health))
        registry.mark_complete()
        assert readiness() == (200, ["ready"])
        registry.mark_failed("other", "2", "its file\nis gone")
        assert readiness() == (200, ["ready", "model other version 2 is UNAVAILABLE: its file is gone"])
        health.mark_down(0, "the device is lost")
        assert readiness() == (
            503,
            [
                "not ready",
                "model m version 1 is UNAVAILABLE: the device is lost",
                "model other version 2 is UNAVAILABLE: its file is gone",
            ],
        )
        health.mark_up(0)
        assert readiness()[0] == 200
        served.service.begin_drain()
        assert readiness()[:2] == (
            503,
            ["not ready", "the server is draining", "model other version 2 is UNAVAILABLE: its file is gone"],
        )


def test_status_of_a_model(served: ServedRoutes, model: Model, runner: ScriptedRunner) -> None:
    model.batcher.last_batches()
    first = model.batcher.submit(np.zeros(1), tag="first")
    runner.await_batches(1)
    waiting = [model.batcher.submit_rows(np.zeros((3, 1)), priority=1, tag="three") for _ in range(2)]
    with pytest.raises(QueueFull):
        model.batcher.submit_rows(np.zeros((3, 1)), priority=2)
    (reported,) = served.status()["models"]
    queue = {"requests": 2, "rows": 6, "rows_by_priority": [6, 0], "running": 1, "bytes": 7 * 8}
    assert reported["queue"] == queue
    assert reported["refusals"] == {"queue_full": 1}
    assert reported["last_batches"] == []
    runner.open()
    for future in (first, *waiting):
        future.result(PATIENCE)
    (reported,) = served.status()["models"]
    x = {"name": "x", "datatype": "FP32", "shape": [-1, 4], "axes": ["batch", 4]}
    y = {"name": "y", "datatype": "INT64", "shape": [-1], "axes": ["batch"]}
    identity = {"name": "m", "version": "3", "state": "READY", "reason": "", "inputs": [x], "outputs": [y]}
    batching = {"batching": "batches of up to 6 rows (proved)", "batching_verdict": "proved"}
    assert reported == reported | identity | batching
    assert reported["settings"] == {
        "max_batch_size": 6,
        "max_queue_delay_seconds": 0.0,
        "preferred_batch_sizes": [],
        "requests_share_batches": True,
        "priority_weights": [1, 1],
        "strict_priorities": True,
        "default_priority": 2,
        "queue_policies": [
            {"timeout_seconds": 60.0, "overridable": False, "action": "reject", "max_requests": 7},
            {"timeout_seconds": None, "overridable": False, "action": "reject", "max_requests": 0},
        ],
        "devices": ["cuda:1"],
        "batches_in_flight_per_device": 1,
        "padded_lengths": [],
        "states": {},
        "slo_seconds": 0.5,
        "max_queue_rows": 8,
        "max_queue_bytes": 1 << 30,
        "max_message_bytes": 64 << 20,
        "run_timeout_seconds": 600.0,
    }
    requests, batches = reported["requests"], reported["batches"]
    assert requests == requests | {"accepted": 3, "answered": 3, "refused": 1}
    assert batches == batches | {"by_rows": {"1": 1, "6": 1}, "by_reason": {"idle": 1, "full": 1}}
    assert [sum(reported["times"][which]) for which in ("queue", "compute", "total")] == [3, 3, 3]
    one, full = reported["last_batches"]
    assert (one["number"], one["requests"], one["rows"], one["reason"]) == (1, 1, 1, "idle")
    assert [(member["id"], member["rows"], member["priority"]) for member in full["members"]] == [
        ("three", 3, 1)
    ] * 2
    moments = [full[name] for name in ("closed", "join_started", "ready", "started", "ended", "answered")]
    assert moments == sorted(moments)


def test_every_field_is_documented_and_nothing_else_is(
    served: ServedRoutes, model: Model, runner: ScriptedRunner
) -> None:
    runner.open()
    model.batcher.last_batches()
    model.batcher.submit(np.zeros(1)).result(PATIENCE)
    branched = BranchedModel(gated=False, processes=(PROCESS,))
    served.registry.mark_ready(branched.model)
    branched.submit().result(PATIENCE)
    states = StatefulBatcher(lambda x: x, [StateTensor("past", "next", np.zeros((1, 1)))], max_batch_size=4)
    served.registry.mark_ready(replace(model, name="states", batcher=states))

    def fields(reported: Any) -> Iterator[str]:
        if isinstance(reported, dict):
            for name, value in reported.items():
                yield name
                # The keys are sizes or reasons, which are values and not names.
                if name not in ("by_rows", "row_seconds", "by_reason", "refusals", "states", "ended"):
                    yield from fields(value)
        elif isinstance(reported, list):
            for one in reported:
                yield from fields(one)

    schema = DOCS.read_text().split("## The schema", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([^|]*)` \|", schema, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"\w+", row)}
    assert documented == set(fields(served.status()))
    branched.close()
    states.close()


def test_hostile_text_is_escaped(served: ServedRoutes, registry: ModelRegistry) -> None:
    """Model names are restricted; reasons, ids and axis names can be any text."""
    hostile = HOSTILE.replace("\ud800", "")
    with Batcher(lambda x: x, 4) as batcher:
        batcher.last_batches()
        batcher.submit(np.zeros(1), tag=HOSTILE).result(PATIENCE)
        registry.mark_ready(Model("m", "1", signature(spec("<b>", "FP32", hostile)), 4, hostile, batcher))
        registry.mark_failed("n", "1", HOSTILE)
        registry.mark_complete()
        status, headers, body = served.ask("/status.json")
        reported = json.loads(body)
        assert status == 200
        assert body.isascii(), "so that no surrogate, control or line separator is in it as such"
        assert reported["models"][0]["last_batches"][0]["members"][0]["id"] == HOSTILE
        assert reported["models"][1]["reason"] == HOSTILE
        assert headers["X-Content-Type-Options"] == "nosniff", "or it might be taken for a page"
        status, headers, body = served.ask("/readyz")
        assert (status, "X-Injected" in headers) == (200, False)
        assert len(body.splitlines()) == 2
        assert headers["Content-Type"].startswith("text/plain")
    status, headers, body = served.ask("/<script>alert(1)</script>")
    assert status == 404
    assert b"script" not in body


def test_every_response_has_the_security_headers(served: ServedRoutes) -> None:
    for path, method in (
        ("/", "GET"),
        ("/", "HEAD"),
        ("/", "POST"),
        ("/metrics", "GET"),
        ("/status.json", "GET"),
        ("/readyz", "GET"),
        ("/nothing", "GET"),
        ("/", "BREW"),
    ):
        _, headers, _ = served.ask(path, method)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'"), (path, method)
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


def test_only_get_and_head_are_allowed(served: ServedRoutes) -> None:
    status, got, body = served.ask("/")
    assert status == 200
    status, headed, nothing = served.ask("/", "HEAD")
    assert (status, nothing) == (200, b"")
    assert headed["Content-Type"] == got["Content-Type"]
    assert int(headed["Content-Length"]) == len(body)
    for method in ("POST", "DELETE", "OPTIONS", "BREW"):
        status, headers, _ = served.ask("/status.json", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("127.1.2.3", 200),
        ("[::1]:1", 200),
        ("localhost.evil.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_a_foreign_host_name_is_refused_on_a_local_server(
    served: ServedRoutes, host: str, status: int
) -> None:
    """DNS rebinding: otherwise a web site could read local data through a browser on this machine."""
    for path in ("/", "/status.json", "/metrics", "/healthz"):
        assert served.ask(path, Host=host)[0] == status


def test_a_public_server_accepts_any_host_name(served: ServedRoutes) -> None:
    server = MetricsServer(
        listen_for_metrics("0.0.0.0", 0),
        lambda accept: (b"", "text/x"),
        routes_of(served.report, served.report.report),
    )
    address = f"http://127.0.0.1:{urlsplit(server.url).port}"
    assert ask(address, "/status.json", Host="gpu7.internal:8002")[0] == 200
    server.close()


def test_a_failing_report_reveals_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    def broken(accept: str) -> HttpResponse:
        raise RuntimeError("a secret")

    server = MetricsServer(listen_for_metrics("127.0.0.1", 0), lambda accept: (b"", ""), {"/broken": broken})
    status, _, body = ask(server.url, "/broken")
    server.close()
    assert status == 500
    assert b"secret" not in body
    assert "a secret" in caplog.text


def test_the_page_loads_no_external_resource(served: ServedRoutes) -> None:
    status, headers, body = served.ask("/")
    page = body.decode()
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"] == content_security_policy(page)
    assert re.findall(r"script-src ([^;]*)", content_security_policy(page))[0].count("'sha256-") == 1
    # Namespaces are names, not addresses.
    elsewhere = re.sub(r"http://www\.w3\.org/2000/svg", "", page)
    assert "//" not in re.sub(r"^\s*//.*$", "", elsewhere, flags=re.MULTILINE)
    for markup in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style="):
        assert markup not in page, "what comes from models and clients gets in as text only"
