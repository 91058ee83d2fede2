"""The Ray Serve application on a Ray of its own: the protocol through Ray's gRPC ingress, batches, deadlines, errors, replicas."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import grpc
import numpy as np
import pytest
from deploy.traffic import Traffic
from e2e.probe import answer, batch_of, output, request
from e2e.server import environment
from wire.programs import CLIENTS, needs

from tensorferry.client import DeadlineExceeded, InferenceClient, NotFound
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

PYTHON = CLIENTS / "ray" / "bin" / "python"
CLUSTER = Path(__file__).with_name("ray_cluster.py")
# Of this tree, whichever the environment has.
SOURCES = os.pathsep.join(
    str(Path(__file__).parents[2] / folder) for folder in ("server", "batcher", "protos", "client")
)
PATIENCE = 100.0

pytestmark = [needs(CLIENTS / "ray" / ".done"), pytest.mark.timeout(300)]


class Cluster:
    """A Ray with the application, until it is left."""

    def __init__(self, log: IO[str], **arguments: Any) -> None:
        self._log = log
        outside = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [PYTHON, CLUSTER, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **outside,
                "PYTHONPATH": SOURCES,
                "RAY_AUTH_MODE": "disabled",
                "RAY_raylet_start_wait_time_s": "200",
                "RAY_USAGE_STATS_ENABLED": "0",
            },
        )
        self.address = f"127.0.0.1:{self._told()['port']}"

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._told()

    def _told(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.communicate(timeout=PATIENCE)
            raise AssertionError(f"Ray ended: {self._logged()}")
        return json.loads(line)

    def end(self) -> None:
        self._process.communicate("end\n", timeout=PATIENCE)
        assert self._process.returncode == 0, self._logged()

    def _logged(self) -> str:
        self._log.seek(0)
        return self._log.read()


@pytest.fixture(scope="module")
def cluster(probe_model: Path, digits_model: Path) -> Iterator[Cluster]:
    assert PYTHON.exists(), "CI needs Ray: make tools"
    with TemporaryFile("w+") as log:
        started = Cluster(
            log,
            models=[str(probe_model), f"digits={digits_model}"],
            deployment={
                "ray_actor_options": {"num_cpus": 0},
                "autoscaling_config": {
                    "min_replicas": 1,
                    "max_replicas": 2,
                    "target_ongoing_requests": 4,
                    "upscale_delay_s": 0.5,
                    "downscale_delay_s": 600,
                    "metrics_interval_s": 0.5,
                    "look_back_period_s": 1,
                },
            },
        )
        yield started
        started.end()


@pytest.fixture
def stub(cluster: Cluster) -> Iterator[inference_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(cluster.address, options=[("grpc.enable_retries", 0)]) as channel:
        yield inference_pb2_grpc.GRPCInferenceServiceStub(channel)


def test_the_bundled_client_is_served(cluster: Cluster) -> None:
    images = np.zeros((3, 8, 8), np.uint8)
    with InferenceClient(cluster.address) as client:
        assert client.is_live(timeout=PATIENCE)
        assert client.is_ready(timeout=PATIENCE)
        assert client.is_model_ready("digits", timeout=PATIENCE)
        assert not client.is_model_ready("nobody", timeout=PATIENCE)
        assert client.server_metadata(timeout=PATIENCE).name == "tensorferry"
        assert client.infer("digits", {"image": images}, timeout=PATIENCE)["label"].shape == (3,)
        results = list(client.stream("digits", ({"image": images[:1]} for _ in range(5)), timeout=PATIENCE))
        assert len(results) == 5


def test_many_requests_share_batches(stub: inference_pb2_grpc.GRPCInferenceServiceStub) -> None:
    blocker = stub.ModelInfer.future(request(1, work=2000), timeout=PATIENCE)
    calls = {tag: stub.ModelInfer.future(request(tag), timeout=PATIENCE) for tag in range(100, 164)}
    responses = {tag: call.result() for tag, call in calls.items()}
    for tag, response in responses.items():
        np.testing.assert_array_equal(output(response), answer(tag))
    assert blocker.result().id == "1"
    assert len({batch_of(response) for response in responses.values()}) < len(responses) / 2


def test_errors_have_their_statuses(
    cluster: Cluster, stub: inference_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    with InferenceClient(cluster.address) as client:
        with pytest.raises(NotFound, match="nobody"):
            client.metadata("nobody", timeout=PATIENCE)
        with pytest.raises(DeadlineExceeded):
            client.submit(
                "probe",
                {"x": np.ones((1, 4), np.float32), "index": np.zeros(1, np.int64), "work": np.full(1, 2000)},
                timeout=0.2,
            ).result()
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request(1, index=99), timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "idx=99" in (caught.value.details() or "")
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(pb.ModelInferRequest(model_name="probe"), timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as caught:
        stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_deadline_that_cannot_be_met_reaches_the_batcher(
    stub: inference_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    """It is refused by the replica, which says so, before the time is over."""
    for _ in range(5):
        stub.ModelInfer(request(1, work=400), timeout=PATIENCE)
    long = [stub.ModelInfer.future(request(tag, work=4000), timeout=PATIENCE) for tag in range(2, 6)]
    call = stub.ModelInfer.future(request(7), timeout=2.0)
    assert call.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK)
    for each in long:
        each.cancel()


def test_replicas_come_with_the_load_and_are_replaced_without_a_failed_call(cluster: Cluster) -> None:
    with (
        grpc.insecure_channel(cluster.address, options=[("grpc.enable_retries", 0)]) as channel,
        Traffic(channel, callers=16) as traffic,
    ):
        while cluster.ask("replicas") < 2:
            traffic.await_more(20)
            assert not traffic.failures
        traffic.await_more()
    assert not traffic.failures


def test_a_wrong_option_is_named_before_anything_starts() -> None:
    script = (
        "from tensorferry.server.ray_serve import application\napplication({'models': ['a.onnx'], 'port': 5})"
    )
    ended = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1
    assert "port is 5; under Ray Serve it cannot be chosen: leave it out" in ended.stderr
