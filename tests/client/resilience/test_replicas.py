"""A call that may have crashed its server is retried once at most; a call that no server ran is retried."""

from __future__ import annotations

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
from client.scripted import ScriptedServer

from tensorferry.client import InferenceClient, Retry, Unavailable, aio
from tensorferry.client.connection.endpoints import Endpoints
from tensorferry.client.connection.retry import ANSWERED_KEY, AttemptEnd, Attempts, RetryBudget, attempt_end
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


async def call(kind: str, target: str, retry: Retry | None = None, **options: Any) -> None:
    """Run one inference with one of the clients."""
    given: dict[str, Any] = {} if retry is None else {"retry": retry}
    if kind == "aio":
        async with aio.InferenceClient(target, check=False, **given) as client:
            await client.infer("m", INPUTS, timeout=30, **options)
    else:
        with InferenceClient(target, check=False, **given) as sync:
            if kind == "infer":
                sync.infer("m", INPUTS, timeout=30, **options)
            else:
                sync.submit("m", INPUTS, timeout=30, **options).result(30)


KINDS = ["infer", "submit", "aio"]


@pytest.mark.parametrize("kind", KINDS)
async def test_one_call_crashes_two_of_three_servers_at_most(
    kind: str, replicas: Callable[..., Replicas]
) -> None:
    three = replicas("ModelInfer")
    with pytest.raises(Unavailable):
        await call(kind, three.target)
    assert three.ended() == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sequence_call_crashes_one_server_at_most(
    kind: str, replicas: Callable[..., Replicas]
) -> None:
    three = replicas("ModelInfer")
    with pytest.raises(Unavailable):
        await call(kind, three.target, parameters=SEQUENCE)
    assert three.ended() == 1


def test_a_health_call_crashes_two_servers_at_most(replicas: Callable[..., Replicas]) -> None:
    three = replicas("ModelMetadata")
    with InferenceClient(three.target) as client, pytest.raises(Unavailable):
        client.infer("m", INPUTS, timeout=30)
    assert three.ended() == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_without_retries_crashes_one_server(
    kind: str, replicas: Callable[..., Replicas]
) -> None:
    three = replicas("ModelInfer")
    with pytest.raises(Unavailable):
        await call(kind, three.target, retry=Retry(attempts=1))
    assert three.ended() == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unreachable_server_is_skipped(kind: str, replicas: Callable[..., Replicas]) -> None:
    three = replicas()
    three.processes[0].kill()
    three.processes[0].wait()
    await call(kind, three.target)


@pytest.mark.parametrize("kind", KINDS)
async def test_unavailable_of_a_tensorferry_server_is_retried(kind: str, server: ScriptedServer) -> None:
    server.servicer.failures = [grpc.StatusCode.UNAVAILABLE] * 3
    server.servicer.failure_trailers = ((ANSWERED_KEY, "1"),)
    await call(kind, server.target, parameters=SEQUENCE)
    assert server.servicer.calls == ["ModelInfer"] * 4


@pytest.mark.parametrize("kind", KINDS)
async def test_unavailable_of_another_server_is_retried_once(kind: str, server: ScriptedServer) -> None:
    """A proxy whose backend has crashed sends the same status, so the call is retried once."""
    server.servicer.failures = [grpc.StatusCode.UNAVAILABLE] * 2
    with pytest.raises(Unavailable):
        await call(kind, server.target)
    assert server.servicer.calls == ["ModelInfer"] * 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_can_forbid_a_retry(kind: str, server: ScriptedServer) -> None:
    server.servicer.failures = [grpc.StatusCode.UNAVAILABLE]
    server.servicer.failure_trailers = (("grpc-retry-pushback-ms", "-1"),)
    with pytest.raises(Unavailable):
        await call(kind, server.target)
    assert server.servicer.calls == ["ModelInfer"]


async def test_a_large_request_is_retried(server: ScriptedServer) -> None:
    large = np.zeros((16_000, 8, 8), np.uint8)  # a megabyte: more than gRPC buffers by default
    server.servicer.failures = [grpc.StatusCode.UNAVAILABLE]
    with InferenceClient(server.target, check=False) as client:
        assert client.infer("digits", {"image": large})["image"].shape == large.shape
    assert server.servicer.calls == ["ModelInfer"] * 2


def test_a_refused_connection_is_tried_four_times() -> None:
    with InferenceClient(NOWHERE, check=False) as client:
        with pytest.raises(Unavailable):
            client.infer("m", INPUTS, parameters=SEQUENCE)
        assert client._retries._left == 97


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
