"""ONNX models with independent rows, and models that mix rows, some only for few values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from support.models.small import node, save, value

Build = Callable[[Path], Path]

_RANDOM = np.random.default_rng(5)


def log_mel(path: Path, axes: tuple[int, ...] = (0, 1)) -> Path:
    """y = max(log x, max(log x) - 8), as in Whisper's features. The maximum is over the batch if `axes` has 0."""
    return save(
        path,
        [
            node("Max", "x least", "positive"),
            node("Log", "positive", "log"),
            node("ReduceMax", "log", "greatest", name="/mel/max", axes=axes, keepdims=1),
            node("Sub", "greatest eight", "floor"),
            node("Max", "log floor", "y"),
        ],
        [value("x")],
        [value("y")],
        {"least": np.float32(1e-10), "eight": np.float32(8)},
    )


def scaled(path: Path, axes: tuple[int, ...] = (0, 1)) -> Path:
    """y = x / max(100, max(x))."""
    return save(
        path,
        [
            node("ReduceMax", "x", "greatest", axes=axes, keepdims=1),
            node("Max", "greatest hundred", "divisor"),
            node("Div", "x divisor", "y"),
        ],
        [value("x")],
        [value("y")],
        {"hundred": np.float32(100)},
    )


def clipped_integers(path: Path) -> Path:
    """y = min(x, max(1000, least x of the batch)): rows mix only if integers exceed 1000."""
    return save(
        path,
        [
            node("ReduceMin", "x", "least", keepdims=1),
            node("Max", "least most", "limit"),
            node("Min", "x limit", "y"),
        ],
        [value("x", "INT64")],
        [value("y", "INT64")],
        {"most": np.int64(1000)},
    )


def similarity(path: Path) -> Path:
    """y [batch, batch]: the products of all rows with all rows."""
    return save(
        path,
        [node("Transpose", "x", "columns", perm=[1, 0]), node("MatMul", "x columns", "y")],
        [value("x")],
        [value("y", dims=("batch", "others"))],
    )


def reversed_rows(path: Path) -> Path:
    """y: the rows of x in the opposite order."""
    return save(
        path,
        [node("Slice", "x from to axis step", "y")],
        [value("x")],
        [value("y")],
        {
            "from": np.array([-1]),
            "to": np.array([-(2**31)]),
            "axis": np.array([0]),
            "step": np.array([-1]),
        },
    )


def sorted_rows(path: Path) -> Path:
    """y: each column of x sorted over the batch."""
    return save(
        path,
        [
            node("Shape", "x", "rows", start=0, end=1),
            node("TopK", "x rows", "y places", axis=0),
        ],
        [value("x")],
        [value("y")],
    )


def recurrent(path: Path, kind: str) -> Path:
    """x [batch, time, 3] → y [batch, 4]: the last state of an LSTM or a GRU, whose batch axis is its second."""
    gates = {"LSTM": 4, "GRU": 3}[kind]
    return save(
        path,
        [
            node("Transpose", "x", "steps", perm=[1, 0, 2]),
            helper.make_node(kind, ["steps", "w", "r"], ["", "last"], hidden_size=4),
            node("Squeeze", "last axis", "y"),
        ],
        [value("x", dims=("batch", "time", 3))],
        [value("y", dims=("batch", 4))],
        {
            "w": _RANDOM.standard_normal((1, 4 * gates, 3)).astype(np.float32),
            "r": _RANDOM.standard_normal((1, 4 * gates, 4)).astype(np.float32),
            "axis": np.array([0]),
        },
    )


def quantised(path: Path, dynamic: bool) -> Path:
    """x [batch, 8] → y [batch, 4]: a layer in 8 bits, with a constant scale or the scale of the batch."""
    weights = _RANDOM.integers(-100, 100, (8, 4)).astype(np.int8)
    constants: dict[str, Any] = {"w": weights, "w_zero": np.int8(0), "w_scale": np.float32(0.02)}
    if dynamic:
        nodes = [node("DynamicQuantizeLinear", "x", "q scale zero", name="/layer/quantise")]
    else:
        nodes = [node("QuantizeLinear", "x scale zero", "q")]
        constants |= {"scale": np.float32(0.03), "zero": np.uint8(128)}
    nodes += [
        node("MatMulInteger", "q w zero w_zero", "sums"),
        node("Cast", "sums", "numbers", to=onnx.TensorProto.FLOAT),
        node("Mul", "numbers scale", "times"),
        node("Mul", "times w_scale", "y"),
    ]
    return save(path, nodes, [value("x", dims=("batch", 8))], [value("y", dims=("batch", 4))], constants)


def batch_normalised(path: Path) -> Path:
    """x [batch, 2, n] → y: normalised by constants."""
    return save(
        path,
        [node("BatchNormalization", "x one zero zero one", "y")],
        [value("x", dims=("batch", 2, "n"))],
        [value("y", dims=("batch", 2, "n"))],
        {"one": np.ones(2, np.float32), "zero": np.zeros(2, np.float32)},
    )


def hashed(path: Path) -> Path:
    """x INT32 [batch] → y UINT32 [batch], by an operator of ONNX Runtime that is not in the ONNX standard."""
    hashing = helper.make_node("MurmurHash3", ["x"], ["y"], domain="com.microsoft", name="/hash")
    return _of_runtime(path, [hashing], value("x", "INT32", ["batch"]), value("y", "UINT32", ["batch"]))


def hashed_elevens(path: Path) -> Path:
    """x [batch, n] → y UINT32 [batch, parts, 11], as `hashed`; n must be a multiple of 11, unlike random inputs."""
    return _of_runtime(
        path,
        [
            node("Constant", "", "parts", value_ints=[0, -1, 11]),
            node("Reshape", "x parts", "grouped"),
            helper.make_node("MurmurHash3", ["grouped"], ["y"], domain="com.microsoft", name="/hash"),
        ],
        value("x", dims=["batch", "n"]),
        value("y", "UINT32", ["batch", "parts", 11]),
    )


def _of_runtime(
    path: Path, nodes: list[onnx.NodeProto], x: onnx.ValueInfoProto, y: onnx.ValueInfoProto
) -> Path:
    graph = helper.make_graph(nodes, path.stem, [x], [y])
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=9), str(path))
    return path
