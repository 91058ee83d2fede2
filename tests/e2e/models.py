"""ONNX models that do what a test needs: take long, raise for one row, mix their rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TABLE_SIZE = 10
_SIDE = 192


def _save(path: Path, graph: onnx.GraphProto) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def probe(path: Path) -> Path:
    """x FP32 [batch, 4], index INT64 [batch], work INT64 [batch] → y FP32 [batch, 4].

    y = 2 x + table[index] with table[i] = i: an index beyond the table raises, which takes
    the whole run with it. The greatest `work` of a batch is the number of matrix products
    that the run takes before it ends, some tenths of a millisecond each.
    """
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["go_on_out"]),
            helper.make_node("MatMul", ["state", "turn"], ["state_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [_SIDE, _SIDE]),
        ],
        [
            helper.make_tensor_value_info("go_on_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_out", TensorProto.FLOAT, [_SIDE, _SIDE]),
        ],
    )
    eye = np.eye(_SIDE, dtype=np.float32)
    constants = {
        "turn": eye,
        "start": np.zeros((_SIDE, _SIDE), np.float32),
        "yes": np.array(True),
        "two": np.float32(2),
        "table": np.arange(TABLE_SIZE, dtype=np.float32).reshape(TABLE_SIZE, 1),
    }
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMax", ["work"], ["turns"], keepdims=0),
            helper.make_node("Loop", ["turns", "yes", "start"], ["end"], body=body),
            helper.make_node("ReduceSum", ["end"], ["zero"], keepdims=0),
            helper.make_node("Gather", ["table", "index"], ["entry"]),
            helper.make_node("Mul", ["x", "two"], ["doubled"]),
            helper.make_node("Add", ["doubled", "entry"], ["sum"]),
            helper.make_node("Add", ["sum", "zero"], ["y"]),
        ],
        "probe",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info("index", TensorProto.INT64, ["batch"]),
            helper.make_tensor_value_info("work", TensorProto.INT64, ["batch"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return _save(path, graph)


def mixing(path: Path) -> Path:
    """x FP32 [batch, 3] → share FP32 [batch, 3]: a softmax over the batch, so rows affect each other."""
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["share"], axis=0)],
        "mixing",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("share", TensorProto.FLOAT, ["batch", 3])],
    )
    return _save(path, graph)


def echo(path: Path, datatype: int = TensorProto.FLOAT, shape: Sequence[str | int] = ("batch", "n")) -> Path:
    """x [batch, n], or of another shape → y = x, of any element type."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "echo",
        [helper.make_tensor_value_info("x", datatype, shape)],
        [helper.make_tensor_value_info("y", datatype, shape)],
    )
    return _save(path, graph)
