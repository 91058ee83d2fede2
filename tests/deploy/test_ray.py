"""The Ray Serve application on a local Ray: protocol, batches, deadlines, errors, replicas."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import grpc
import numpy as np
import pytest
from deploy.traffic import Traffic
from support.processes.probe import OpenStream, answer, batch_of, output, request
from support.processes.server import environment
from support.wire.programs import CLIENTS, needs

from tensorferry.client import InferenceClient, NotFound, ResourceExhausted
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

PYTHON = CLIENTS / "ray" / "bin" / "python"
CLUSTER = Path(__file__).with_name("ray_cluster.py")
# Of this checkout; the environment may have been made for another one.
SOURCES = os.pathsep.join(
    str(Path(__file__).parents[2] / folder) for folder in ("server", "batcher", "protos", "client")
)
# Bounds for waits that end at once unless something is broken; Ray starts a dozen processes, and
# replaces them one by one.
PATIENCE = 100.0
START = 400.0
# Matrix products of the probe model that take some seconds, longer than a request's way to a
# replica.
SECONDS = 16_000
MOST_QUEUED = 100

pytestmark = [needs(CLIENTS / "ray" / ".done"), pytest.mark.timeout(600)]


def surroundings() -> Mapping[str, str]:
    """Environment without another Ray, without telemetry, and with longer timeouts for slow machines."""
    outside = {name: value for name, value in environment().items() if not name.startswith("RAY_")}
    return {
        **outside,
        "PYTHONPATH": SOURCES,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_register_timeout_seconds": "300",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    }


def of_session(session: int) -> list[int]:
    """Return the processes of a session, to which all processes started by its first belong."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Fields after the name, which may hold anything: state, parent, group, session.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


class Cluster:
    """A Ray with the application, until it is ended."""

    # Address of the gRPC ingress.
    address = ""

    def __init__(self, log: IO[str], folder: str, **arguments: Any) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [PYTHON, CLUSTER, folder, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=surroundings(),
            # The session identifies all processes that Ray starts; its workers have their own
            # process groups.
            start_new_session=True,
        )

    def start(self) -> str:
        """Start it, and return its address."""
        told = self._told(START)
        if "unable" in told:
            # In CI a skipped test must not pass.
            assert not os.environ.get("CI"), told["unable"]
            pytest.skip(f"Ray does not start here: {told['unable']}")
        return f"127.0.0.1:{told['port']}"

    def replicas(self) -> dict[str, int]:
        """Return the process of each running replica."""
        answered: dict[str, int] = self._ask("replicas")
        return answered

    def deploy(self, **arguments: Any) -> dict[str, int]:
        """Replace each replica; return the processes that run then."""
        answered: dict[str, int] = self._ask(arguments)
        return answered

    def end(self) -> None:
        """End it, and everything that Ray leaves behind."""
        try:
            self._process.communicate(json.dumps("end"), timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
        assert self._process.returncode == 0, self._logged()

    def kill(self) -> None:
        while left := of_session(self._process.pid):
            for each in left:
                try:
                    os.kill(each, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        self._process.wait()

    def _ask(self, what: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(what)}\n")
        self._process.stdin.flush()
        return self._told(START)

    def _told(self, patience: float) -> Any:
        assert self._process.stdout is not None
        # Unbuffered: each line is one answer.
        ready, _, _ = select.select([self._process.stdout], [], [], patience)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise AssertionError(f"Ray {'ended' if ready else 'hangs'}: {self._logged()}")
        return json.loads(line)

    def _logged(self) -> str:
        self._log.seek(0)
        return self._log.read()


@pytest.fixture(scope="module")
def models(probe_model: Path, digits_model: Path) -> list[str]:
    assert PYTHON.exists(), "CI needs Ray: make tools"
    return [f"{name}={probe_model}" for name in ("probe", "slow")] + [f"digits={digits_model}"]


@pytest.fixture(scope="module")
def cluster(models: list[str]) -> Iterator[Cluster]:
    # Not below pytest's folder, because the names of Ray's sockets must be short.
    folder = tempfile.mkdtemp(prefix="ray")
    with tempfile.TemporaryFile("w+") as log:
        started = Cluster(
            log,
            folder,
            models=models,
            deployment={"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
            **{"max-queue-size": MOST_QUEUED},
        )
        try:
            started.address = started.start()
            yield started
            started.end()
        finally:
            started.kill()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def channel(cluster: Cluster) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(cluster.address, options=[("grpc.enable_retries", 0)]) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> inference_pb2_grpc.GRPCInferenceServiceStub:
    return inference_pb2_grpc.GRPCInferenceServiceStub(channel)


def blocked(channel: grpc.Channel, work: int = SECONDS) -> OpenStream:
    """Keep the model busy for some seconds, so that later requests wait."""
    stream = OpenStream(channel)
    stream.send(request(1, work=work))
    return stream


def rows_of(response: pb.ModelInferResponse) -> int:
    return response.parameters["batch_rows"].int64_param


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


def test_many_requests_share_batches(
    channel: grpc.Channel, stub: inference_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    """If Ray takes longer than the batch that runs, few requests wait together. The next attempt doubles its work."""
    for attempt in range(5):
        blocker = blocked(channel, SECONDS << attempt)
        calls = {tag: stub.ModelInfer.future(request(tag), timeout=PATIENCE) for tag in range(100, 164)}
        responses = {tag: call.result() for tag, call in calls.items()}
        for tag, response in responses.items():
            np.testing.assert_array_equal(output(response), answer(tag))
        blocker.await_answer("1")
        blocker.half_close()
        batches = {batch_of(response) for response in responses.values()}
        if len(batches) < len(responses) / 4:
            return
    pytest.fail(f"{len(responses)} requests in {len(batches)} batches")


def test_errors_have_their_statuses(
    cluster: Cluster, stub: inference_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    with InferenceClient(cluster.address) as client, pytest.raises(NotFound, match="nobody"):
        client.metadata("nobody", timeout=PATIENCE)
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


def test_a_full_queue_is_refused_with_a_retry_time(cluster: Cluster) -> None:
    """The batches that run while the requests are sent are slow, so that the queue fills on machines of any speed."""
    inputs = {
        "x": np.ones((1, 4), np.float32),
        "index": np.zeros(1, np.int64),
        "work": np.full(1, SECONDS, np.int64),
    }
    with InferenceClient(cluster.address) as client:
        # Those of the queue run for some batches.
        calls = [client.submit("probe", inputs, timeout=3 * PATIENCE) for _ in range(4 * MOST_QUEUED)]
        refused = [error for call in calls if (error := call.exception()) is not None]
    assert 0 < len(refused) <= 3 * MOST_QUEUED
    for error in refused:
        assert isinstance(error, ResourceExhausted)
        assert error.retry_after is not None


def test_a_stream_has_its_order_and_the_end_that_it_asks_for(
    stub: inference_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    """tests/server/ray/test_stream.py has the other orders."""
    # If a request failed immediately, a later answer would overtake it.
    requests = [request(1, work=200), request(2, model="nobody"), request(3)]
    ordered = list(stub.ModelStreamInfer(iter(requests), timeout=PATIENCE))
    assert [each.infer_response.id for each in ordered] == ["1", "2", "3"]
    assert "nobody" in ordered[1].error_message
    np.testing.assert_array_equal(output(ordered[2].infer_response), answer(3))

    ending = stub.ModelStreamInfer(
        iter(requests), timeout=PATIENCE, metadata=(("triton_grpc_error", "true"),)
    )
    assert next(ending).infer_response.id == "1"
    with pytest.raises(grpc.RpcError) as caught:
        next(ending)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_deadline_reaches_the_batcher(stub: inference_pb2_grpc.GRPCInferenceServiceStub) -> None:
    """The batcher, which knows the model's run time, refuses an unreachable deadline with its own
    message.
    """
    said = []
    for _ in range(5):
        started = time.monotonic()
        stub.ModelInfer(request(1, work=SECONDS, model="slow"), timeout=PATIENCE)
        half = (time.monotonic() - started) / 2
        call = stub.ModelInfer.future(request(2, work=SECONDS, model="slow"), timeout=half)
        assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        said.append(call.details())
        if "alone the request would take" in said[-1]:
            return
    pytest.fail(f"never refused for its deadline: {said}")


def test_a_cancelled_call_is_withdrawn(
    channel: grpc.Channel, stub: inference_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    """A cancelled unary call or stream is withdrawn: only the remaining requests are in the next
    batch.

    If Ray takes longer than the batch that runs, the requests come too late. The next attempt
    doubles the batch's work.
    """
    rows = []
    for attempt in range(5):
        blocker = blocked(channel, SECONDS << attempt)
        stays = stub.ModelInfer.future(request(2), timeout=PATIENCE)
        leaves = stub.ModelInfer.future(request(3), timeout=PATIENCE)
        stream = OpenStream(channel)
        stream.send(request(4), request(5))
        leaves.cancel()
        stream.cancel()
        comes = stub.ModelInfer.future(request(6), timeout=PATIENCE)
        rows.append(rows_of(stays.result()))
        together = batch_of(comes.result()) == batch_of(stays.result())
        blocker.await_answer("1")
        blocker.half_close()
        if together and rows[-1] == 2:
            return
    pytest.fail(f"rows of the batches beside the cancelled requests, which should be 2: {rows}")


def test_replicas_scale_and_are_replaced_without_a_failed_call(
    cluster: Cluster,
    models: list[str],
    channel: grpc.Channel,
    stub: inference_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    """Only an open stream is ended, with UNAVAILABLE, after its replica has waited for it."""
    arguments = {
        "models": models,
        "drain-seconds": 10,
        "deployment": {
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
    }
    cluster.deploy(**arguments)
    with Traffic(channel, callers=12) as traffic:
        while len(old := cluster.replicas()) < 2:
            traffic.await_more(20)
            assert not traffic.failures
        underway = stub.ModelInfer.future(request(1, work=SECONDS // 4), timeout=PATIENCE)
        new = cluster.deploy(**arguments)
        assert len(new) == 2
        assert not new.keys() & old.keys()
        traffic.await_more()
    assert not traffic.failures
    assert traffic.left >= 1
    np.testing.assert_array_equal(output(underway.result()), answer(1))


def test_a_call_of_a_killed_replica_is_unavailable(
    cluster: Cluster, channel: grpc.Channel, stub: inference_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    call = stub.ModelInfer.future(request(1, work=20 * SECONDS), timeout=PATIENCE)
    # By then the call is on its way.
    blocked(channel).cancel()
    for process in cluster.replicas().values():
        os.kill(process, signal.SIGKILL)
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    assert call.details() == "the replica of this call is gone; other replicas accept calls: try again"
    while True:
        # Ray replaces them.
        again = stub.ModelInfer.future(request(2), timeout=PATIENCE)
        if again.code() is grpc.StatusCode.OK:
            break
        assert again.code() is grpc.StatusCode.UNAVAILABLE, again.details()
    np.testing.assert_array_equal(output(again.result()), answer(2))


def test_a_replica_without_a_working_model_is_unhealthy(digits_model: Path) -> None:
    """Ray then replaces the replica."""
    script = (
        "import asyncio\n"
        "from tensorferry.server.ray_serve import Replica\n"
        f"replica = Replica({{'models': ['digits={digits_model}']}})\n"
        "asyncio.run(replica.check_health())\n"
        "(model,) = replica._app.registry.models()\n"
        "model.health.mark_down(0, 'the device is gone')\n"
        "asyncio.run(replica.check_health())\n"
    )
    ended = subprocess.run(
        [PYTHON, "-c", script], capture_output=True, text=True, timeout=PATIENCE, env=surroundings()
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "RuntimeError: digits: the device is gone"
