"""Axes of length zero on a real server: accepted if the model supports them, refused if they would
crash it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.models import recurrent
from support.processes import models
from support.processes.server import ServerProcess, running
from support.wire.inputs import tensor
from support.wire.rig import until_known
from tritonclient.utils import InferenceServerException

WORDS = np.ones((1, 3), np.int64)
PROBED = (
    ("gru", "ids", ("INT64", np.int64), (1, 0)),
    ("lstm", "x", ("FP32", np.float32), (2, 0, 3)),
    ("echo", "x", ("FP32", np.float32), (3, 0)),
    ("mixing", "x", ("FP32", np.float32), (0, 3)),
)
NO_WORDS = np.zeros((1, 0), np.int64)
MESSAGE = (
    r"axis 1 of input 'ids' \(shape \[1, 0\]\) has length zero, which model 'gru' is not known to support"
)


@pytest.fixture(scope="module")
def server(transport: str, model_dir: Path, mixing_model: Path) -> Iterator[ServerProcess]:
    served: list[str | Path] = [
        recurrent.gru(model_dir / "gru.onnx"),
        recurrent.lstm(model_dir / "lstm.onnx"),
        models.echo(model_dir / "echo.onnx"),
        mixing_model,
    ]
    with running(*served, transport=transport) as server:
        with triton.InferenceServerClient(server.address) as client:
            for model, name, datatype, dims in PROBED:
                until_known(client, model, tensor(name, np.zeros(dims, datatype[1]), datatype[0]))
        yield server


def test_empty_axes_that_crash_are_refused(client: triton.InferenceServerClient) -> None:
    for _ in range(2):
        with pytest.raises(InferenceServerException, match=MESSAGE) as caught:
            client.infer("gru", [tensor("ids", NO_WORDS, "INT64")])
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert client.infer("gru", [tensor("ids", WORDS, "INT64")]).as_numpy("y").shape == (1, 4)


def test_supported_empty_axes_are_computed(client: triton.InferenceServerClient) -> None:
    result = client.infer("lstm", [tensor("x", np.zeros((2, 0, 3), np.float32), "FP32")])
    assert result.as_numpy("states").shape == (2, 0, 4)
    np.testing.assert_array_equal(result.as_numpy("y"), np.zeros((2, 4)))
    assert client.infer("echo", [tensor("x", np.zeros((3, 0), np.float32), "FP32")]).as_numpy("y").shape == (
        3,
        0,
    )


def test_zero_rows_of_an_unbatched_model(client: triton.InferenceServerClient) -> None:
    """For a model that mixes its rows, axis 0 is like any other axis."""
    x = tensor("x", np.zeros((0, 3), np.float32), "FP32")
    assert client.infer("mixing", [x]).as_numpy("share").shape == (0, 3)
