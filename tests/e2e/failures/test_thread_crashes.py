"""A thread of the server crashes under load: health reports it at once, and the server recovers or
exits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from e2e.failures.test_device_failure import (
    NOT_SERVING,
    PATIENCE,
    SERVING,
    Health,
    dial,
    infer,
    infer_when_ready,
    message,
)
from e2e.fixtures import Serve
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.processes import faulty
from support.processes.metrics import scrape, scrape_until
from support.processes.server import SERVER_PROCESSES

from tensorferry.protos import inference_pb2_grpc

CLIENTS = 4
# Seconds without batches after a crash of the device's worker, for consecutive crashes.
STANDS_BACK = (0.1, 0.2, 0.4)


def test_health_follows_each_crash_and_recovery(serve_faulty: Serve) -> None:
    """Under load each request gets its right answer, and none is lost, though workers crash."""
    server = serve_faulty("--metrics-port", "0", expects_falls=True)
    ended: Counter[str] = Counter()
    # Guards outcomes.
    lock = threading.Lock()
    stop = threading.Event()

    def load(client: int) -> None:
        with dial(server) as channel:
            stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            number = 0
            while not stop.is_set():
                number += 1
                what = infer(stub, float(100 * client + number % 90), rows=(1, 1, 2)[number % 3])
                with lock:
                    ended[what] += 1

    with dial(server) as channel, ThreadPoolExecutor(CLIENTS) as clients:
        health, whole = Health(channel, "probe"), Health(channel, "")
        running = [clients.submit(load, client) for client in range(CLIENTS)]
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            for fall, seconds in enumerate(STANDS_BACK):
                seen = len(health.changes), len(whole.changes)
                began = time.monotonic()
                assert infer(stub, faulty.FALL + fall) == "right", "it ran once more"
                for watched, before in zip((health, whole), seen, strict=True):
                    watched.await_status(NOT_SERVING, after=before)
                    watched.await_status(SERVING, after=watched.changes.index(NOT_SERVING, before))
                out, back = (health.times[seen[0] + step] - began for step in (0, 1))
                print(
                    f"a worker dead: NOT_SERVING after {out * 1e3:.1f} ms, SERVING after {back * 1e3:.1f} ms, "
                    f"of which {seconds * 1e3:g} are meant"
                )
                assert back >= seconds
                assert scrape(server)["tensorferry_instance_events_total{event=worker_died}"] == fall + 1
            # Both observers see each crash exactly once.
            for watched in (health, whole):
                assert watched.changes == [SERVING, *[NOT_SERVING, SERVING] * len(STANDS_BACK)]
        finally:
            stop.set()
        for each in running:
            each.result(PATIENCE)
    assert set(ended) <= {"right", "UNAVAILABLE"}, "between crash and restart the model is not ready"
    assert ended["right"] > 0
    assert server.stop() == 0
    said = [line for line in server.log if "a worker ended unexpectedly; this is a bug" in line]
    assert len(said) == len(STANDS_BACK)
    for line, seconds in zip(said, STANDS_BACK, strict=True):
        assert f"Another takes its place in {seconds:g} s" in line


def test_without_the_polling_thread_the_process_exits(serve_faulty: Serve, tmp_path: Path) -> None:
    """grpcio's own thread cannot be restarted, so the process exits; a call in flight gets UNAVAILABLE
    at once. One of several processes is replaced.
    """
    deaf, release = tmp_path / "deaf", tmp_path / "release"
    variables = {faulty.POLLING: str(deaf), faulty.RELEASE: str(release)}
    server = serve_faulty("--metrics-port", "0", expects_falls=True, **variables)
    with dial(server) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert infer(stub, 1.0) == "right"
        in_flight = stub.ModelInfer.future(message(faulty.HANG), timeout=PATIENCE)
        scrape_until(server, lambda found: found["tensorferry_running_requests"] == 1)
        deaf.touch()
        began = time.monotonic()
        health = health_pb2_grpc.HealthStub(channel)
        try:
            health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        except grpc.RpcError as error:
            code: Any = error
            # The status depends on core's race between the end of the call and of the connection.
            assert code.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        else:
            raise AssertionError("the health check was answered")
        assert in_flight.exception(PATIENCE).code() is grpc.StatusCode.UNAVAILABLE
        print(f"without polling: ended after {time.monotonic() - began:.3f} s")
    if SERVER_PROCESSES:
        deaf.unlink()
        release.touch()
        with dial(server) as channel:
            infer_when_ready(inference_pb2_grpc.GRPCInferenceServiceStub(channel))
        assert server.stop() == 0
    else:
        assert server.wait() == 1
    assert any("requests are not served without the thread" in line for line in server.log)
