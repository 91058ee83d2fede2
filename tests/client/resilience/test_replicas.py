"""A call that may have crashed its server is retried once at most; a call that no server ran is retried."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import grpc
import numpy as np
import pytest
from client import calls
from client.scripted import ScriptedServer

from tensorferry.client import InferenceClient, Retry, Unavailable
from tensorferry.client.connection.endpoints import Endpoints
from tensorferry.client.connection.retry import ANSWERED_KEY, Attempts, RetryBudget
from tensorferry.client.errors import of_code
from tensorferry.protos import inference_pb2 as pb

INPUTS = {"x": np.zeros(1, np.int64)}
SEQUENCE: dict[str, bool | int | float | str] = {"sequence_id": 7, "sequence_start": True}

# A server that ends by SIGABRT, as a native crash does, when it runs one of the methods named. It prints its address.
_REPLICA = """
import os, resource, sys
from client.scripted import ScriptedServer, ScriptedServicer
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
ScriptedServicer._called = lambda self, name, *_: os.abort() if name in sys.argv else None
scripted = ScriptedServer.make()
scripted.server.start()
print(scripted.target, flush=True)
scripted.server.wait_for_termination()
"""


@dataclass(frozen=True, slots=True)
class Replicas:
    processes: dict[str, subprocess.Popen[str]]

    @property
    def target(self) -> str:
        return "ipv4:" + ",".join(self.processes)

    def ended(self) -> int:
        """Number of servers that have ended."""
        return sum(itertools.starmap(self._has_ended, self.processes.items()))

    def _has_ended(self, address: str, process: subprocess.Popen[str]) -> bool:
        with InferenceClient(address, retry=None) as client:
            return not client.is_live() and process.wait(60) == -signal.SIGABRT


@pytest.fixture
def replicas() -> Iterator[Callable[..., Replicas]]:
    with contextlib.ExitStack() as stack:

        def start(*ending: str) -> Replicas:
            words = [sys.executable, "-c", _REPLICA, *ending]
            variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            processes = [
                stack.enter_context(
                    subprocess.Popen(
                        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables
                    )
                )
                for _ in range(3)
            ]
            for process in processes:
                stack.callback(process.kill)
            return Replicas({one.stdout.readline().strip(): one for one in processes if one.stdout})

        yield start


def call(method: str, target: str, **options: Any) -> None:
    """Run one inference by this method."""
    with InferenceClient(target, check=False) as client:
        calls.call(client, method, "m", INPUTS, timeout=30, **options)


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


def test_a_registration_of_shared_memory_is_not_repeated(server: ScriptedServer) -> None:
    with InferenceClient(server.target) as client:
        client.metadata("digits")
        server.servicer.failures = [grpc.StatusCode.UNAVAILABLE]
        with pytest.raises(Unavailable), client.shared_memory("digits", rows=1):
            pass
    assert server.servicer.calls.count("SystemSharedMemoryRegister") == 1


@dataclass(frozen=True, slots=True)
class Call:
    """Stand-in for a finished call of grpcio."""

    trailers: tuple[tuple[str, str | bytes], ...] = ()

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.trailers


REFUSED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"


@pytest.mark.parametrize(
    ("text", "trailers", "retry_after", "retries"),
    [
        (REFUSED, (), None, (3, 3)),
        ("DNS resolution failed for a:1", (), None, (3, 3)),
        ("Socket closed", (), None, (1, 0)),
        ("what core may say one day", (), None, (1, 0)),
        # Envoy's messages for a reset connection, and for an unreachable server.
        ("upstream connect error or disconnect/reset before headers", (("server", "envoy"),), None, (1, 0)),
        (REFUSED, (("server", "envoy"),), None, (1, 0)),
        ("the model is not ready", ((ANSWERED_KEY, "1"),), None, (3, 3)),
        ("the device failed", (), 1.0, (3, 3)),
        ("full", (("grpc-retry-pushback-ms", "-1"),), None, (0, 0)),
    ],
)  # fmt: skip
def test_the_end_of_an_attempt_decides_about_the_next(
    text: str, trailers: tuple[tuple[str, str], ...], retry_after: float | None, retries: tuple[int, int]
) -> None:
    """Retries of a request by itself, and of one of a sequence."""
    error = of_code(grpc.StatusCode.UNAVAILABLE, text, "", retry_after)
    for parameters, expected in zip(({}, SEQUENCE_PARAMETERS), retries, strict=True):
        attempts = attempts_of(pb.ModelInferRequest(parameters=parameters))
        assert [attempts.delay(error, Call(trailers), None) is not None for _ in range(4)].count(
            True
        ) == expected


def test_one_retry_at_most_after_an_unknown_end() -> None:
    """After a broken connection, a refusal and another broken connection there is no further attempt."""
    attempts = attempts_of(pb.ModelInferRequest())
    broken = of_code(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    refused = of_code(grpc.StatusCode.UNAVAILABLE, REFUSED)
    given = [attempts.delay(error, Call(), None) is not None for error in (broken, refused, broken)]
    assert given == [True, True, False]


SEQUENCE_PARAMETERS = {"sequence_id": pb.InferParameter(int64_param=7)}


def attempts_of(request: pb.ModelInferRequest) -> Attempts:
    attempts = Attempts(RetryBudget(Retry()), request, Endpoints([cast(Any, object)]))
    attempts.next()
    return attempts
