"""Repositories like Triton's examples load unchanged, and their clients work unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.models.small import written
from support.processes.server import running
from support.wire.inputs import tensor

SUM_AND_DIFFERENCE = """
name: "simple"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [
  {
    name: "INPUT0"
    data_type: TYPE_INT32
    dims: [ 16 ]
  },
  {
    name: "INPUT1"
    data_type: TYPE_INT32
    dims: [ 16 ]
  }
]
output [
  {
    name: "OUTPUT0"
    data_type: TYPE_INT32
    dims: [ 16 ]
  },
  {
    name: "OUTPUT1"
    data_type: TYPE_INT32
    dims: [ 16 ]
  }
]
"""

IMAGE_CLASSES = """
name: "classes_onnx"
platform: "onnxruntime_onnx"
max_batch_size : 0
input [
  {
    name: "data_0"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [ 3, 8, 8 ]
    reshape { shape: [ 1, 3, 8, 8 ] }
  }
]
output [
  {
    name: "fc6_1"
    data_type: TYPE_FP32
    dims: [ 3 ]
    reshape { shape: [ 1, 3, 1, 1 ] }
    label_filename: "class_labels.txt"
  }
]
"""

BATCHED = """
backend: "onnxruntime"
max_batch_size: 16
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 100
}
instance_group [ { count: 2 kind: KIND_CPU } ]
version_policy: { all { } }
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
optimization { graph : { level : 1 } }
model_warmup [
  {
    name: "zeros"
    batch_size: 4
    inputs { key: "TEXT" value: { data_type: TYPE_STRING dims: 2 zero_data: true } }
  }
]
"""


def write_examples(root: Path) -> None:
    def write(model: str, text: str, config: str = "", *versions: str, **constants: Any) -> None:
        for version in versions or ("1",):
            (root / model / version).mkdir(parents=True)
            written(root / model / version / "model.onnx", text, **constants)
        if config:
            (root / model / "config.pbtxt").write_text(config)

    both = [f"int32[batch, 16] {name}" for name in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")]
    write(
        "simple",
        f"({', '.join(both[:2])}) => ({', '.join(both[2:])}) "
        "{ OUTPUT0 = Add (INPUT0, INPUT1) OUTPUT1 = Sub (INPUT0, INPUT1) }",
        SUM_AND_DIFFERENCE,
    )
    write(
        "classes_onnx",
        "(float[1, 3, 8, 8] data_0) => (float[1, 3, 1, 1] fc6_1) { fc6_1 = GlobalAveragePool (data_0) }",
        IMAGE_CLASSES,
    )
    (root / "classes_onnx" / "class_labels.txt").write_text("TEAPOT\nFERRY\nLIGHTHOUSE\n")
    write(
        "strings",
        "(string[batch, 2] TEXT) => (string[batch, 2] SAME) { SAME = Identity (TEXT) }",
        BATCHED,
        "1",
        "3",
    )
    # Without a configuration.
    write("bare", "(float[batch, n] x) => (float[batch, n] y) { y = Mul (x, two) }", two=np.float32(2))


@pytest.fixture(scope="module")
def client(
    transport: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[triton.InferenceServerClient]:
    root = tmp_path_factory.mktemp("examples")
    write_examples(root)
    with (
        running("--model-repository", root, transport=transport) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        yield client


def test_all_models_are_ready_as_configured(client: triton.InferenceServerClient) -> None:
    index = [(m.name, m.version, m.state) for m in client.get_model_repository_index().models]
    assert index == [
        ("bare", "1", "READY"),
        ("classes_onnx", "1", "READY"),
        ("simple", "1", "READY"),
        ("strings", "1", "READY"),
        ("strings", "3", "READY"),
    ]
    config = client.get_model_config("strings", as_json=True)["config"]
    assert config["max_batch_size"] == 16
    assert config["dynamic_batching"]["preferred_batch_size"] == [4, 8]
    assert config["input"][0]["dims"] == ["2"]
    bare = client.get_model_config("bare").config
    assert (bare.max_batch_size, bare.platform, bare.input[0].name) == (32, "onnxruntime_onnx", "x")


@pytest.mark.parametrize("rows", [1, 8])
def test_sum_and_difference(client: triton.InferenceServerClient, rows: int) -> None:
    first = np.arange(16 * rows, dtype=np.int32).reshape(rows, 16)
    second = np.ones((rows, 16), np.int32)
    wanted = [triton.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
    result = client.infer(
        "simple", [tensor("INPUT0", first, "INT32"), tensor("INPUT1", second, "INT32")], outputs=wanted
    )
    assert (result.as_numpy("OUTPUT0") == first + second).all()
    assert (result.as_numpy("OUTPUT1") == first - second).all()


def test_classes_of_an_image(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata("classes_onnx")
    assert [list(metadata.inputs[0].shape), list(metadata.outputs[0].shape)] == [[3, 8, 8], [3]]
    image = np.stack([np.full((8, 8), shade, np.float32) for shade in (0.25, 3, 1.5)])
    wanted = [triton.InferRequestedOutput("fc6_1", class_count=2)]
    result = client.infer("classes_onnx", [tensor("data_0", image, "FP32")], outputs=wanted)
    assert result.as_numpy("fc6_1").tolist() == [b"3.000000:1:FERRY", b"1.500000:2:LIGHTHOUSE"]


def test_strings_of_both_versions(client: triton.InferenceServerClient) -> None:
    text = np.array([[b"a", "ferry ⛴".encode()]], dtype=np.object_)
    for version in ("", "1", "3"):
        result = client.infer("strings", [tensor("TEXT", text, "BYTES")], model_version=version)
        assert result.as_numpy("SAME").tolist() == text.tolist()
        assert result.get_response().model_version == (version or "3")


def test_without_a_configuration(client: triton.InferenceServerClient) -> None:
    x = np.ones((3, 5), np.float32)
    assert (client.infer("bare", [tensor("x", x, "FP32")]).as_numpy("y") == 2 * x).all()
