"""A call that may have crashed its server is retried once at most; a call that no server ran is retried."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from client import calls
from client.scripted import ScriptedServer

from tensorferry.client import InferenceClient, Retry, Unavailable
from tensorferry.client.connection.endpoints import Endpoints
from tensorferry.client.connection.retry import (
    ANSWERED_KEY,
    DEFAULT_RETRY,
    AttemptEnd,
    Attempts,
    RetryBudget,
    attempt_end,
)
from tensorferry.client.errors import of_code
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

INPUTS = {"x": np.zeros(1, np.int64)}
SEQUENCE: dict[str, bool | int | float | str] = {"sequence_id": 7, "sequence_start": True}
NOWHERE = "127.0.0.1:1"  # port 1 is never listened on


@dataclass(frozen=True, slots=True)
class Replicas:
    processes: list[subprocess.Popen[str]]
    target: str

    def ended(self) -> int:
        """Number of servers that have ended."""
        return sum(map(self._has_ended, self.processes, self.target.removeprefix("ipv4:").split(",")))

    def _has_ended(self, process: subprocess.Popen[str], address: str) -> bool:
        with grpc.insecure_channel(address, [("grpc.enable_retries", 0)]) as channel:
            try:
                inference_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest())
            except grpc.RpcError as error:
                code = cast(grpc.Call, error).code()
        if code is grpc.StatusCode.UNIMPLEMENTED:  # it is there to say so
            return False
        return process.wait(60) == -signal.SIGABRT


@pytest.fixture
def replicas() -> Iterator[Callable[..., Replicas]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*ending: str) -> Replicas:
        for _ in range(3):
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("replica.py")), *ending],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            )
        ports = [int(process.stdout.readline()) for process in processes if process.stdout]
        return Replicas(processes, "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports))

    yield start
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def call(method: str, target: str, retry: Retry | None = DEFAULT_RETRY, **options: Any) -> None:
    """Run one inference by this method."""
    with InferenceClient(target, check=False, retry=retry) as client:
        calls.call(client, method, "m", INPUTS, timeout=30, **options)


by_method = pytest.mark.parametrize("method", ["infer", "submit"])


@pytest.mark.parametrize(
    ("method", "options", "ended"),
    [("infer", {}, 2), ("submit", {}, 2), ("infer", {"parameters": SEQUENCE}, 1)],
    ids=["infer", "submit", "sequence"],
)
def test_one_call_crashes_two_of_three_servers_at_most(
    method: str, options: dict[str, Any], ended: int, replicas: Callable[..., Replicas]
) -> None:
    three = replicas("ModelInfer")
    with pytest.raises(Unavailable):
        call(method, three.target, **options)
    assert three.ended() == ended


def test_a_call_for_metadata_crashes_two_servers_at_most(replicas: Callable[..., Replicas]) -> None:
    three = replicas("ModelMetadata")
    with InferenceClient(three.target) as client, pytest.raises(Unavailable):
        client.infer("m", INPUTS, timeout=30)
    assert three.ended() == 2


@by_method
def test_an_unreachable_server_is_skipped(method: str, server: ScriptedServer) -> None:
    call(method, f"ipv4:{NOWHERE},{server.target}")


@by_method
@pytest.mark.parametrize(
    ("trailers", "failures", "attempts"),
    [
        pytest.param(((ANSWERED_KEY, "1"),), 3, 4, id="of a tensorferry server"),
        # A proxy whose backend has crashed sends the same status.
        pytest.param((), 2, 2, id="of another server"),
        pytest.param((("grpc-retry-pushback-ms", "-1"),), 1, 1, id="of a server that forbids it"),
    ],
)
def test_retries_of_unavailable(
    method: str, server: ScriptedServer, trailers: Any, failures: int, attempts: int
) -> None:
    server.servicer.failures = [grpc.StatusCode.UNAVAILABLE] * failures
    server.servicer.failure_trailers = trailers
    with contextlib.nullcontext() if attempts > failures else pytest.raises(Unavailable):
        call(method, server.target, parameters=SEQUENCE if attempts > failures else None)
    assert server.servicer.calls == ["ModelInfer"] * attempts


def test_a_registration_of_shared_memory_is_not_repeated(server: ScriptedServer) -> None:
    with InferenceClient(server.target) as client:
        client.metadata("digits")
        server.servicer.failures = [grpc.StatusCode.UNAVAILABLE]
        with pytest.raises(Unavailable), client.shared_memory("digits", rows=1):
            pass
    assert server.servicer.calls.count("SystemSharedMemoryRegister") == 1


def test_a_large_request_is_retried(server: ScriptedServer) -> None:
    large = np.zeros((16_000, 8, 8), np.uint8)  # a megabyte: more than gRPC buffers by default
    server.servicer.failures = [grpc.StatusCode.UNAVAILABLE]
    with InferenceClient(server.target, check=False) as client:
        assert client.infer("digits", {"image": large})["image"].shape == large.shape
    assert server.servicer.calls == ["ModelInfer"] * 2


@dataclass(frozen=True, slots=True)
class Call:
    """Stand-in for a finished call of grpcio."""

    trailers: tuple[tuple[str, str | bytes], ...] = ()

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.trailers


REFUSED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"


@pytest.mark.parametrize(
    ("text", "trailers", "retry_after", "ending"),
    [
        (REFUSED, (), None, AttemptEnd.NEVER_SENT),
        ("DNS resolution failed for a:1", (), None, AttemptEnd.NEVER_SENT),
        ("Socket closed", (), None, AttemptEnd.UNKNOWN),
        ("Stream removed (Socket closed)", (), None, AttemptEnd.UNKNOWN),
        ("what core may say one day", (), None, AttemptEnd.UNKNOWN),
        # Envoy's messages for a reset connection, and for an unreachable server.
        ("upstream connect error or disconnect/reset before headers", (("server", "envoy"),), None, AttemptEnd.UNKNOWN),
        (REFUSED, (("server", "envoy"),), None, AttemptEnd.UNKNOWN),
        ("the model is not ready", ((ANSWERED_KEY, "1"),), None, AttemptEnd.ANSWERED),
        ("the device failed", (), 1.0, AttemptEnd.ANSWERED),
        ("full", (("grpc-retry-pushback-ms", "-1"),), None, AttemptEnd.FINAL),
    ],
)  # fmt: skip
def test_attempts_are_classified(
    text: str, trailers: tuple[tuple[str, str], ...], retry_after: float | None, ending: AttemptEnd
) -> None:
    error = of_code(grpc.StatusCode.UNAVAILABLE, text, "", retry_after)
    assert attempt_end(Call(trailers), error) is ending


def test_one_retry_at_most_after_an_unknown_end() -> None:
    """After a broken connection, a refusal and another broken connection there is no further attempt."""
    attempts = Attempts(RetryBudget(Retry()), pb.ModelInferRequest(), Endpoints(()))
    broken = of_code(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    refused = of_code(grpc.StatusCode.UNAVAILABLE, REFUSED)
    given = [attempts.delay(error, Call(), None) is not None for error in (broken, refused, broken)]
    assert given == [True, True, False]
    sequence = pb.ModelInferRequest()
    sequence.parameters["sequence_id"].int64_param = 7
    attempts = Attempts(RetryBudget(Retry()), sequence, Endpoints(()))
    given = [attempts.delay(refused, Call(), None) is not None for _ in range(4)]
    assert given == [True, True, True, False], "no server ran it, so it is tried four times"
