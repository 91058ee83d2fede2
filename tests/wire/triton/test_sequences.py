"""Sequences as Triton's clients send them, over gRPC and HTTP."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from e2e.fixtures import Serve
from polling import PATIENCE
from support.models import small
from support.processes.server import ServerProcess

TEXT = "(float[batch, 2] x, float[batch, 2] past) => (float[batch, 2] y, float[batch, 2] next) { next = Add (past, x) y = Neg (next) }"


@pytest.fixture(scope="module")
def server(share: Serve, model_dir: Path) -> ServerProcess:
    path = model_dir / "sums.onnx"
    if not path.exists():
        small.written(path, TEXT)
    return share(path, "--state", "past=next", "--http-port", 0)


def inputs(x: float, kind: Callable[..., Any] = triton.InferInput) -> list[Any]:
    made = kind("x", [1, 2], "FP32")
    made.set_data_from_numpy(np.full((1, 2), x, np.float32))
    return [made]


@pytest.mark.parametrize("number", [3, "a name"])
def test_unary_calls(client: triton.InferenceServerClient, number: int | str) -> None:
    def infer(x: float, **flags: bool) -> float:
        result = client.infer("sums", inputs(x), sequence_id=number, **flags)
        return float(result.as_numpy("y")[0, 0])

    assert [infer(1, sequence_start=True), infer(2), infer(3, sequence_end=True)] == [-1, -3, -6]
    with pytest.raises(triton.InferenceServerException, match="has ended with its last request"):
        infer(1)


def test_a_stream(client: triton.InferenceServerClient) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put(error or result.as_numpy("y")[0, 0]))
    for x in (1, 2, 3):
        client.async_stream_infer(
            "sums", inputs(x), sequence_id=9, sequence_start=x == 1, sequence_end=x == 3
        )
    assert [answers.get(timeout=PATIENCE) for _ in range(3)] == [-1, -3, -6]
    client.stop_stream()


def test_http(server: ServerProcess) -> None:
    with triton_http.InferenceServerClient(server.ready["http"].removeprefix("http://")) as client:

        def infer(x: float, **flags: bool) -> float:
            given = inputs(x, triton_http.InferInput)
            return float(client.infer("sums", given, sequence_id=5, **flags).as_numpy("y")[0, 0])

        assert [infer(1, sequence_start=True), infer(2), infer(3, sequence_end=True)] == [-1, -3, -6]
        with pytest.raises(triton_http.InferenceServerException, match="has ended with its last request"):
            infer(1)
