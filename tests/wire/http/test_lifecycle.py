"""HTTP of a server that drains, and of one with several processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.fixtures import Serve
from polling import PATIENCE, until
from support.processes import observed
from support.processes.faulty import HANG
from support.processes.server import SERVER_PROCESSES, ServerProcess
from support.wire.http_inputs import probe, tensor, wanted
from tritonclient.http import InferenceServerClient, InferInput, InferResult


class Caller:
    """One connection that stays open."""

    def __init__(self, server: ServerProcess) -> None:
        self.connection = HTTPConnection(server.ready["http"].removeprefix("http://"), timeout=PATIENCE)

    def send(self, tag: float) -> Caller:
        """Send an inference with this number."""
        return self.infer("probe", probe(int(tag)))

    def infer(self, model: str, inputs: list[InferInput], **named: Any) -> Caller:
        """Send an inference."""
        body, length = InferenceServerClient.generate_request_body(inputs, **named)
        headers = {"Inference-Header-Content-Length": str(length)}
        self.connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        return self

    def read(self) -> tuple[int, str | None, float]:
        """Return the status, the header Connection, and the last number of the answer."""
        response = self.connection.getresponse()
        length = response.headers["Inference-Header-Content-Length"]
        result = InferResult.from_response_body(response.read(), header_length=length)
        return response.status, response.headers["Connection"], float(result.as_numpy("y")[-1, -1])

    def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body of a GET request."""
        self.connection.request("GET", path)
        response = self.connection.getresponse()
        return response.status, response.read()

    def await_end(self) -> None:
        """Wait until the server closes the connection."""
        assert self.connection.sock is not None
        assert self.connection.sock.recv(1) == b""

    def close(self) -> None:
        self.connection.close()


Connect = Callable[[ServerProcess], Caller]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect callers, which are closed at the end."""
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(closing(Caller(server)))


def test_accepted_requests_are_answered_before_the_end(
    serve_faulty: Serve, tmp_path: Path, connect: Connect
) -> None:
    release = tmp_path / "release"
    server = serve_faulty("--http-port", "0", "--max-batch-size", "1", FAULTY_RELEASE=str(release))
    # One runs until it is released, and others wait for it.
    callers = [connect(server).send(HANG), *(connect(server).send(tag) for tag in range(5))]
    # Its JSON is written by another thread, after the model has ended.
    in_json = wanted("y", binary_data=False)
    callers.append(connect(server).infer("probe", probe(5, rows=2000), outputs=in_json))
    idle = connect(server)
    # Its answer shows that what was sent before has arrived.
    assert idle.get("/v2/health/ready")[0] == 200
    server.signal(signal.SIGTERM)
    idle.await_end()
    with pytest.raises(ConnectionRefusedError):
        connect(server).get("/v2/health/live")
    release.touch()
    found = [caller.read() for caller in callers]
    assert found == [(200, "close", 2.0 * HANG), *((200, "close", 2.0 * tag) for tag in range(6))]
    assert server.wait() == 0


def test_an_answer_is_sent_to_its_end(serve: Serve, echo_model: Path, connect: Connect) -> None:
    server = serve(echo_model, "--http-port", "0")
    # More than buffers of the system hold, to a client that does not read yet.
    x = np.full((1, 3 << 20), 3, np.float32)
    caller = connect(server).infer("echo", [tensor("x", x, "FP32")])
    idle = connect(server)
    until(lambda: b'"execution_count":1' in idle.get("/v2/models/echo/stats")[1])
    server.signal(signal.SIGTERM)
    idle.await_end()
    assert caller.read()[::2] == (200, 3.0)
    assert server.wait() == 0


def test_a_load_balancer_has_time_to_see_a_drain(serve: Serve, probe_model: Path, connect: Connect) -> None:
    server = serve(probe_model, "--http-port", "0", "--drain-delay-seconds", "60")
    caller = connect(server)
    assert caller.send(1).read() == (200, None, 2.0)
    server.signal(signal.SIGTERM)
    until(lambda: connect(server).get("/v2/health/ready")[0], (503).__eq__)
    assert connect(server).get("/v2/health/live")[0] == 200
    # So that no connection that a client uses is left when the drain begins.
    assert caller.send(2).read() == (200, "close", 4.0)
    assert connect(server).send(3).read() == (200, "close", 6.0)

    def signalled() -> int | None:
        server.signal(signal.SIGINT)
        return server.process.poll()

    # Without waiting for the delay. Signals within a second of the first do not count.
    until(signalled, lambda code: code is not None)


def test_each_of_several_processes_answers(serve: Serve, probe_model: Path, connect: Connect) -> None:
    options = () if SERVER_PROCESSES else ("--processes", "2")
    server = serve(probe_model, *options, "--http-port", "0")
    processes = observed.of_module(server.process.pid, "tensorferry.server.processes")
    assert len(processes) == 2
    for stopped in processes:
        # So that only the other can take the connection.
        os.kill(stopped, signal.SIGSTOP)
        until(partial(Path(f"/proc/{stopped}/status").read_text), lambda text: "State:\tT" in text)
        try:
            for tag in range(3):
                assert connect(server).send(tag).read() == (200, None, 2.0 * tag)
        finally:
            os.kill(stopped, signal.SIGCONT)
    with InferenceServerClient(server.ready["http"].removeprefix("http://")) as client:
        (found,) = client.get_inference_statistics("probe")["model_stats"]
    assert found["inference_count"] == 6
