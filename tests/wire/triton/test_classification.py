"""Triton's classification extension, with tritonclient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.processes.server import ServerProcess
from support.wire.inputs import tensor
from support.wire.rig import Stream


@pytest.fixture
def server(echoes: ServerProcess) -> ServerProcess:
    return echoes


def classes(count: int) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput("y", class_count=count)]


def infer(client: triton.InferenceServerClient, kind: str, array: Any, count: int) -> Any:
    return client.infer(f"echo-{kind}", [tensor("x", array, kind)], outputs=classes(count))


def test_classes_of_equal_values(client: triton.InferenceServerClient) -> None:
    result = infer(client, "FP32", np.ones((1, 8), np.float32), 5)
    output = result.get_output("y")
    assert (output.datatype, list(output.shape)) == ("BYTES", [1, 5])
    assert result.as_numpy("y").tolist() == [[f"1.000000:{index}".encode() for index in range(5)]]


def test_each_row_has_classes_of_its_own(client: triton.InferenceServerClient) -> None:
    result = infer(client, "INT64", np.array([[1, 5, 10, 4], [-1, -5, -10, -4]]), 2)
    assert result.as_numpy("y").tolist() == [[b"10:2", b"5:1"], [b"-1:0", b"-4:3"]]
    # More classes than elements give all.
    assert infer(client, "INT64", np.array([[3, 4]]), 100).as_numpy("y").tolist() == [[b"4:1", b"3:0"]]


def test_classes_and_values_in_a_stream(client: triton.InferenceServerClient) -> None:
    given = [tensor("x", np.array([[3, 4]]), "INT64")]
    with Stream(client) as stream:
        stream.send("echo-INT64", given, "classes", outputs=classes(1))
        stream.send("echo-INT64", given, "values")
        assert stream.result().as_numpy("y").tolist() == [[b"4:1"]]
        assert stream.result().as_numpy("y").tolist() == [[3, 4]]
