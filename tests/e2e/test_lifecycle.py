"""A server starts, reports errors, drains and stops, and clients that leave leave nothing behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
from e2e.fixtures import Serve
from grpc_health.v1 import health_pb2, health_pb2_grpc
from polling import until
from support.processes import observed
from support.processes.faulty import HANG
from support.processes.probe import OpenStream, answer, output, request
from support.processes.server import ServerProcess, environment, run_command

from tensorferry.client import InferenceClient, Unavailable
from tensorferry.protos import inference_pb2_grpc

# A file of text, which is not a model.
_TEXT = Path(__file__).parents[2] / "README.md"

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["x.onnx", "--metrics-port", "70000"],
            2,
            "--metrics-port is '70000'; it must be none or an integer from 0 to 65535",
        ),
        ([f"text={_TEXT}"], 1, f"{_TEXT}: ONNX Runtime cannot load it"),
    ],
)
def test_a_bad_option_exits_2_and_a_bad_model_exits_1(arguments: list[str], code: int, message: str) -> None:
    result = run_command("serve", *arguments, "--port", "0")
    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_named(digits_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_command("serve", digits_model, "--port", port)
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


def test_sigterm_drains(serve_faulty: Serve, tmp_path: Path) -> None:
    """Health changes, new calls get UNAVAILABLE, accepted requests finish, and the exit code is 0."""
    release = tmp_path / "release"
    server = serve_faulty("--drain-seconds", "60", FAULTY_RELEASE=str(release))
    with grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        stream = OpenStream(channel)
        # Runs until it is released, however long the next steps take.
        stream.send(request(1, first=HANG), request(2))
        server.signal()
        assert next(watch).status == NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request(3), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in (caught.value.details() or "")
        release.touch()
        for tag, first in ((1, HANG), (2, None)):
            response = stream.await_answer(str(tag))
            np.testing.assert_array_equal(output(response.infer_response), answer(tag, first=first))
        with pytest.raises(grpc.RpcError) as ended:
            stream.await_answer("another")
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.wait() == 0


def test_drain_seconds_bound_the_drain(serve_faulty: Serve, tmp_path: Path) -> None:
    """The server does not wait for a run that never ends."""
    server = serve_faulty("--drain-seconds", "0.2", FAULTY_RELEASE=str(tmp_path / "never"))
    with grpc.insecure_channel(server.address) as channel:
        stream = OpenStream(channel)
        stream.send(request(1, first=HANG))
        server.signal()
        with pytest.raises(grpc.RpcError) as caught:
            stream.await_answer("1")
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert server.wait() == 0


def test_signals_directly_after_each_other_are_one(serve_faulty: Serve, tmp_path: Path) -> None:
    """GNU timeout sends two. Here they differ, because the kernel makes one of two equal ones that wait."""
    release = tmp_path / "release"
    server = serve_faulty("--drain-seconds", "60", FAULTY_RELEASE=str(release))
    with grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        stream = OpenStream(channel)
        stream.send(request(1, first=HANG))
        # Both arrive at once, so that no pause of this process separates them.
        with server.standing_still():
            server.signal(signal.SIGINT)
            server.signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        release.touch()
        response = stream.await_answer("1")
        np.testing.assert_array_equal(output(response.infer_response), answer(1, first=HANG))
    assert server.wait() == 0


def _signal_until_it_ends(server: ServerProcess) -> None:
    """Send signals: those within a second of the first do not count."""

    def signalled() -> int | None:
        server.signal()
        return server.process.poll()

    until(signalled, lambda code: code is not None)


def test_a_second_signal_stops_at_once(serve_faulty: Serve, tmp_path: Path) -> None:
    server = serve_faulty("--drain-seconds", "600", FAULTY_RELEASE=str(tmp_path / "never"))
    with grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        stream = OpenStream(channel)
        stream.send(request(1, first=HANG))
        server.signal()
        assert next(watch).status == NOT_SERVING
        _signal_until_it_ends(server)
        assert server.wait() == 128 + signal.SIGTERM
        with pytest.raises(grpc.RpcError):
            stream.await_answer("1")


_LEAVER = """
import os, sys, queue
sys.path[:0] = {path!r}
import grpc
from support.processes.probe import OpenStream, request
channel = grpc.insecure_channel({address!r})
stream = OpenStream(channel)
stream.send(*(request(tag) for tag in range(1, 20)))
os.kill(os.getpid(), 9)
"""


def test_killed_clients_leave_nothing_behind(serve: Serve, probe_model: Path) -> None:
    """Their queued requests are withdrawn, so that the next batch has none of them."""
    server = serve(
        probe_model, "--max-batch-size", "64", "--max-queue-delay-ms", "600000", "--max-queue-size", "40"
    )
    script = _LEAVER.format(path=sys.path, address=server.address)
    with grpc.insecure_channel(server.address) as channel:
        for _ in range(2):
            killed = subprocess.run([sys.executable, "-c", script], timeout=60, env=environment())
            assert killed.returncode == -signal.SIGKILL
            _await_room(channel)


def _await_room(channel: grpc.Channel) -> None:
    """Return when the queue of 40 rows takes 40 again, so that everything queued is gone."""
    while True:
        stream = OpenStream(channel)
        stream.send(*(request(tag) for tag in range(100, 140)))
        refused = [answer for answer in stream.answers.values() if "queue is full" in answer.error_message]
        stream.cancel()
        if not refused:
            return


def test_many_streams_come_and_go_without_threads_or_memory_growing(serve: Serve, probe_model: Path) -> None:
    server = serve(probe_model)

    def round_of_streams() -> None:
        for number in range(60):
            with grpc.insecure_channel(server.address) as channel:
                stream = OpenStream(channel)
                stream.send(request(1))
                if number % 3 == 0:
                    stream.cancel()
                elif number % 3 == 1:
                    stream.half_close()
                    assert [r.infer_response.id for r in stream._responses if not r.error_message] in (
                        [],
                        ["1"],
                    )

    def threads() -> int:
        return sum(observed.held(pid).threads for pid in server.processes())

    def memory() -> int:
        return sum(observed.held(pid).memory for pid in server.processes())

    round_of_streams()
    round_of_streams()
    before = threads(), memory()
    for _ in range(3):
        round_of_streams()
    # A leak would be a thread for one of five streams, or 100 KB for each. Finished threads end
    # soon, and so do cancelled streams.
    until(threads, lambda now: now <= before[0] + 36)
    until(memory, lambda now: now <= before[1] + (18 << 20))


def test_a_server_that_is_gone_is_unavailable(serve: Serve, digits_model: Path) -> None:
    server = serve(digits_model)
    with InferenceClient(server.address) as client:
        assert client.is_live()
        assert server.stop() == 0
        assert not client.is_live(timeout=5)
        with pytest.raises(Unavailable):
            client.infer("digits", {"image": np.zeros((1, 8, 8), np.uint8)}, timeout=60)
