"""Sequences as Triton's clients send them, over gRPC and HTTP."""

from __future__ import annotations

import queue
import subprocess
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
from support.processes.server import ServerProcess, command, environment, running

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
            return float(client.infer("sums", given, sequence_id=2**64 - 1, **flags).as_numpy("y")[0, 0])

        assert [infer(1, sequence_start=True), infer(2), infer(3, sequence_end=True)] == [-1, -3, -6]
        with pytest.raises(triton_http.InferenceServerException, match="has ended with its last request"):
            infer(1)


# `sequence_batching` of config.pbtxt.

CONTROLLED = """(float[batch, 1] x, float[batch, 1] past, float[batch, 1] start, int32[batch, 1] ready, bool[batch, 1] end,
    int64[batch, 1] id) => (float[batch, 1] y, float[batch, 1] next, float[batch, 3] flags, int64[batch, 1] number)
{ next = Add (past, x) y = Identity (next) number = Identity (id)
  r = Cast <to = 1> (ready) e = Cast <to = 1> (end) flags = Concat <axis = 1> (start, r, e) }"""
CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
output { name: "flags" data_type: TYPE_FP32 dims: 3 }
output { name: "number" data_type: TYPE_INT64 dims: 1 }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { preferred_batch_size: 4 }
  state {
    input_name: "past" output_name: "next" data_type: TYPE_FP32 dims: 1
    initial_state { name: "ten" data_type: TYPE_FP32 dims: 1 data_file: "ten" }
  }
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 5 ] } }
  control_input { name: "ready" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ -1, 1 ] } }
  control_input { name: "end" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } }
  control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
}
"""


def repository(folder: Path, config: str = CONFIG) -> Path:
    home = folder / "controlled"
    (home / "1").mkdir(parents=True)
    small.written(home / "1" / "model.onnx", CONTROLLED)
    (home / "config.pbtxt").write_text(config)
    (home / "initial_state").mkdir()
    (home / "initial_state" / "ten").write_bytes(np.float32(10).tobytes())
    return folder


@pytest.mark.parametrize("listed", [True, False])
def test_a_configuration_declares_states_and_controls(transport: str, tmp_path: Path, listed: bool) -> None:
    config = CONFIG if listed else CONFIG[CONFIG.index("sequence_batching") :]
    x = triton.InferInput("x", [1, 1], "FP32")
    x.set_data_from_numpy(np.ones((1, 1), np.float32))

    with running("--model-repository", repository(tmp_path, config), transport=transport) as server:
        client = triton.InferenceServerClient(server.address)

        def infer(number: int, **flags: bool) -> list[float]:
            found = client.infer("controlled", [x], sequence_id=number, **flags)
            y, flags_of, number_of = (found.as_numpy(name) for name in ("y", "flags", "number"))
            return [*y[0].tolist(), *flags_of[0].tolist(), *number_of[0].tolist()]

        assert infer(7, sequence_start=True) == [11, 5, 1, 0, 7]
        assert infer(8, sequence_start=True, sequence_end=True) == [11, 5, 1, 1, 8]
        assert infer(7) == [12, 0, 1, 0, 7]
        assert infer(7, sequence_end=True) == [13, 0, 1, 1, 7]
        assert infer(0) == [11, 5, 1, 1, 0]
        with pytest.raises(triton.InferenceServerException, match="model input 'id' takes an integer"):
            client.infer("controlled", [x], sequence_id="seven", sequence_start=True)
        shown = client.get_model_config("controlled").config
        assert [tensor.name for tensor in shown.input] == ["x"]
        assert [tensor.name for tensor in shown.output] == ["y", "flags", "number"]
        assert len(shown.sequence_batching.control_input) == 4
        assert not shown.HasField("dynamic_batching")


def test_a_state_among_the_outputs_is_part_of_each_answer(transport: str, tmp_path: Path) -> None:
    config = CONFIG.replace(
        'output { name: "y"', 'output { name: "next" data_type: TYPE_FP32 dims: 1 }\noutput { name: "y"'
    )
    x = triton.InferInput("x", [1, 1], "FP32")
    x.set_data_from_numpy(np.ones((1, 1), np.float32))
    with running("--model-repository", repository(tmp_path, config), transport=transport) as server:
        client = triton.InferenceServerClient(server.address)
        assert client.infer("controlled", [x], sequence_id=1, sequence_start=True).as_numpy("next") == 11


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'input_name: "past"',
            'input_name: "before"',
            "unexpected inference input 'before'",
        ),
        ("[ 0, 5 ]", "[ 0 ]", "has 1 values; give int32_false_true"),
        ('name: "ready" control', 'name: "start" control', "has the input 'start' twice"),
        ('data_file: "ten"', 'data_file: "../config.pbtxt"', "which is not in"),
        ('data_file: "ten"', 'data_file: "none"', "which cannot be used"),
        ("dims: 1 data_file", "dims: 2 data_file", "cannot be used"),
        (
            "fp32_false_true: [ 0, 5 ]",
            "int32_false_true: [ 0, 5 ]",
            "expects datatype TYPE_INT32 for input 'start'",
        ),
    ],
)
def test_a_bad_configuration_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CONFIG
    folder = repository(tmp_path, CONFIG.replace(old, new, 1))
    done = subprocess.run(
        command("serve", "--model-repository", folder, "--port", "0"),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert message in done.stderr + done.stdout
