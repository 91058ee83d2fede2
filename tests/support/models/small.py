"""Small ONNX models, each with one property that a test needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dims = Sequence[int | str | None]

ELEMENT = {
    "BOOL": TensorProto.BOOL, "INT8": TensorProto.INT8, "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32, "INT64": TensorProto.INT64, "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16, "UINT32": TensorProto.UINT32, "UINT64": TensorProto.UINT64,
    "FP16": TensorProto.FLOAT16, "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16, "BYTES": TensorProto.STRING,
}  # fmt: skip


def value(name: str, datatype: str = "FP32", dims: Dims = ("batch", 3)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENT[datatype], dims)


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, Any] | None = None,
) -> Path:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, tensors)
    domains = [helper.make_opsetid(domain, 1) for domain in {one.domain for one in nodes} - {""}]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), *domains], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def identity(path: Path, *inputs: onnx.ValueInfoProto) -> Path:
    """Each input is returned as an output whose name has the suffix `_out`."""
    outputs = []
    for given in inputs:
        output = onnx.ValueInfoProto()
        output.CopyFrom(given)
        output.name += "_out"
        outputs.append(output)
    nodes = [node("Identity", given.name, f"{given.name}_out") for given in inputs]
    return save(path, nodes, inputs, outputs)


def echo(path: Path, datatype: str = "FP32", dims: Dims = ("batch", "n")) -> Path:
    """x → x_out."""
    return identity(path, value("x", datatype, dims))


def twice(path: Path, dims: Dims = ("batch", 3)) -> Path:
    """y = 2 x."""
    return save(
        path,
        [node("Mul", "x two", "y")],
        [value("x", dims=dims)],
        [value("y", dims=dims)],
        {"two": np.float32(2)},
    )


def halved(path: Path, datatype: str) -> Path:
    """x [batch, n] of any datatype but BYTES → y = x / 2, computed in FP32."""
    return save(
        path,
        [
            node("Cast", "x", "number", to=TensorProto.FLOAT),
            node("Mul", "number half", "less"),
            node("Cast", "less", "y", to=ELEMENT[datatype]),
        ],
        [value("x", datatype, ("batch", "n"))],
        [value("y", datatype, ("batch", "n"))],
        {"half": np.float32(0.5)},
    )


def wide(path: Path, width: int) -> Path:
    """x FP32 [batch, 1] → y [batch] = x, computed through copies of each number."""
    return save(
        path,
        [node("Mul", "x ones", "copies"), node("ReduceMax", "copies", "y", axes=[1], keepdims=0)],
        [value("x", dims=("batch", 1))],
        [value("y", dims=("batch",))],
        {"ones": np.ones((1, width), np.float32)},
    )


def mlp(path: Path, dtype: type[np.floating[Any]] = np.float32) -> Path:
    """x [batch, 8] → p [batch, 4]: a softmax over each row's scores."""
    generator = np.random.default_rng(1)
    datatype = {np.float16: "FP16", np.float32: "FP32", np.float64: "FP64"}[dtype]
    return save(
        path,
        [
            node("MatMul", "x w", "h"),
            node("Relu", "h", "r"),
            node("MatMul", "r v", "s"),
            node("Softmax", "s", "p", axis=1),
        ],
        [value("x", datatype, ["batch", 8])],
        [value("p", datatype, ["batch", 4])],
        {
            "w": generator.standard_normal((8, 16)).astype(dtype),
            "v": generator.standard_normal((16, 4)).astype(dtype),
        },
    )


def conv(path: Path) -> Path:
    """image [batch, 1, h, w], at least 5 × 5 → label INT64 [batch], score FP32 [batch, 2]."""
    kernels = np.random.default_rng(2).standard_normal((2, 1, 5, 5)).astype(np.float32)
    return save(
        path,
        [
            node("Conv", "image kernels", "maps"),
            node("GlobalAveragePool", "maps", "pooled"),
            node("Flatten", "pooled", "score"),
            node("ArgMax", "score", "label", axis=1, keepdims=0),
        ],
        [value("image", dims=["batch", 1, "h", "w"])],
        [value("label", "INT64", ["batch"]), value("score", dims=["batch", 2])],
        {"kernels": kernels},
    )


def reshaped_conv(path: Path) -> Path:
    """Like `conv`, with only the label as output."""
    model = onnx.load(str(conv(path)))
    del model.graph.output[1]
    onnx.save(model, str(path))
    return path


def softmax_over_rows(path: Path) -> Path:
    """fine = x; share = softmax of x over the batch."""
    return save(
        path,
        [node("Identity", "x", "fine"), node("Softmax", "x", "share", axis=0)],
        [value("x")],
        [value("fine"), value("share")],
    )


def centred(path: Path) -> Path:
    """y = x - mean of x over the batch."""
    return save(
        path,
        [node("ReduceMean", "x", "mean", axes=[0], keepdims=1), node("Sub", "x mean", "y")],
        [value("x")],
        [value("y")],
    )


def running_sum(path: Path) -> Path:
    """y = cumulative sum of x over the batch: each row depends on the rows before it."""
    return save(path, [node("CumSum", "x axis", "y")], [value("x")], [value("y")], {"axis": np.int64(0)})


def total(path: Path) -> Path:
    """y [k, 3] = sum of x over the batch: one row, although k is declared as variable."""
    return save(
        path,
        [node("ReduceSum", "x axes", "y", keepdims=1)],
        [value("x")],
        [value("y", dims=["k", 3])],
        {"axes": np.array([0])},
    )


def noisy(path: Path) -> Path:
    """y = random numbers with the shape of x."""
    return save(path, [node("RandomNormalLike", "x", "y")], [value("x")], [value("y")])


def multiples_only(path: Path, of: int) -> Path:
    """x [batch, n], n a multiple of `of` → y [batch, parts]: sums of `of` numbers each."""
    return save(
        path,
        [node("Reshape", "x parts", "grouped"), node("ReduceSum", "grouped axes", "y", keepdims=0)],
        [value("x", dims=["batch", "n"])],
        [value("y", dims=["batch", "parts"])],
        {"parts": np.array([0, -1, of]), "axes": np.array([2])},
    )


def one_row_only(path: Path) -> Path:
    """y = x; more than one row raises."""
    return save(
        path,
        [
            node("Shape", "x", "rows", start=0, end=1),
            node("Gather", "zeros rows", "zero"),
            node("Add", "x zero", "y"),
        ],
        [value("x")],
        [value("y")],
        {"zeros": np.zeros(2, np.float32)},
    )


def squeezed(path: Path) -> Path:
    """y = x; the analysis of the graph cannot tell whether the rows mix."""
    nodes = [node("Squeeze", "x", "flat"), node("Shape", "x", "shape"), node("Reshape", "flat shape", "y")]
    return save(path, nodes, [value("x")], [value("y")])


def lookup(path: Path, size: int = 10) -> Path:
    """index INT64 [batch] → y FP32 [batch, 1] = index; an index of at least `size` raises."""
    table = np.arange(size, dtype=np.float32).reshape(size, 1)
    return save(
        path,
        [node("Gather", "table index", "y", name="/a/place/in/the/model")],
        [value("index", "INT64", ["batch"])],
        [value("y", dims=["batch", 1])],
        {"table": table},
    )


def without_stop_words(path: Path, words: Sequence[str] = ("the", "a"), dims: Dims = ("batch",)) -> Path:
    """x BYTES [batch] → y, the elements in lower case, without stop words."""
    # An empty list would have no type.
    stop = {"stopwords": words} if words else {}
    return save(
        path,
        [node("StringNormalizer", "x", "y", case_change_action="LOWER", locale="C", **stop)],
        [value("x", "BYTES", dims)],
        [value("y", "BYTES", dims)],
    )


def spelt(path: Path) -> Path:
    """x BYTES [batch] → y FP32, the number that each string spells; the file also has an unused table of words."""
    return save(
        path,
        [
            node("Cast", "x", "y", to=TensorProto.FLOAT),
            node("Identity", "table", "words"),
        ],
        [value("x", "BYTES", ["batch"])],
        [value("y", dims=["batch"])],
        {"table": np.array(["one", "two"], dtype=object)},
    )


def added(path: Path) -> Path:
    """y = a + b; only the run compares their shapes."""
    dims = ["batch", "n"]
    return save(
        path,
        [node("Add", "a b", "y")],
        [value("a", dims=dims), value("b", dims=dims)],
        [value("y", dims=dims)],
    )


def sequence(path: Path) -> Path:
    """x → a sequence of tensors, which the protocol does not have."""
    output = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    return save(path, [node("SequenceConstruct", "x", "y")], [value("x")], [output])


def masked_mean(path: Path, tokens: str = "sequence") -> Path:
    """ids, mask INT64 [batch, sequence] → tokens FP32 [batch, sequence, 4], their mean over the mask [batch, 4].

    tokens = table[ids] of 100 ids. The mean does not depend on padding, because the mask excludes it.
    `tokens` is the name of the axis in the outputs.
    """
    dims = ["batch", "sequence"]
    return save(
        path,
        [
            node("Gather", "table ids", "tokens"),
            node("Cast", "mask", "weights", to=TensorProto.FLOAT),
            node("Unsqueeze", "weights last", "spread"),
            node("Mul", "tokens spread", "weighted"),
            node("ReduceSum", "weighted axis", "summed", keepdims=0),
            node("ReduceSum", "weights axis", "count", keepdims=1),
            node("Div", "summed count", "mean"),
        ],
        [value("ids", "INT64", dims), value("mask", "INT64", dims)],
        [value("tokens", dims=["batch", tokens, 4]), value("mean", dims=["batch", 4])],
        {
            "table": np.random.default_rng(3).standard_normal((100, 4)).astype(np.float32),
            "last": np.array([2]),
            "axis": np.array([1]),
        },
    )


def mean_of_numbers(path: Path) -> Path:
    """ids, mask INT64 [batch, sequence] → mean FP32 [batch], that of the ids over the mask."""
    dims = ["batch", "sequence"]
    return save(
        path,
        [
            node("Cast", "ids", "numbers", to=TensorProto.FLOAT),
            node("Cast", "mask", "weights", to=TensorProto.FLOAT),
            node("Mul", "numbers weights", "weighted"),
            node("ReduceSum", "weighted axis", "summed", keepdims=0),
            node("ReduceSum", "weights axis", "count", keepdims=0),
            node("Div", "summed count", "mean"),
        ],
        [value("ids", "INT64", dims), value("mask", "INT64", dims)],
        [value("mean", dims=["batch"])],
        {"axis": np.array([1])},
    )


def plain_mean(path: Path) -> Path:
    """x FP32 [batch, sequence, 2] → y [batch, 2], the mean over the sequence, including padding."""
    return save(
        path,
        [node("ReduceMean", "x", "y", axes=[1], keepdims=0)],
        [value("x", dims=["batch", "sequence", 2])],
        [value("y", dims=["batch", 2])],
    )


def with_positions(path: Path, most: int = 20) -> Path:
    """x FP32 [batch, sequence] → y = x + position, with at most `most` positions; longer rows raise."""
    return save(
        path,
        [
            node("Shape", "x", "end", start=1, end=2),
            node("Squeeze", "end", "end_scalar"),
            node("Range", "start end_scalar step", "positions"),
            node("Gather", "table positions", "embedded"),
            node("Add", "x embedded", "y"),
        ],
        [value("x", dims=["batch", "sequence"])],
        [value("y", dims=["batch", "sequence"])],
        {"start": np.int64(0), "step": np.int64(1), "table": np.arange(most, dtype=np.float32)},
    )


def attention(path: Path, masked: bool = True, width: int = 8, layers: int = 1) -> Path:
    """ids, mask INT64 [batch, sequence] → tokens FP32 [batch, sequence, width]: self-attention.

    Positions with mask 0 have no weight. Without `masked`, the mask is ignored.
    """
    dims = ["batch", "sequence"]
    generator = np.random.default_rng(4)
    weights = generator.standard_normal((layers, 2, width, width)) / np.sqrt(width)
    nodes = [
        node("Gather", "table ids", "x0"),
        node("Cast", "mask", "weight", to=TensorProto.FLOAT),
        node("Unsqueeze", "weight middle", "seen"),
        node("Sub", "one seen", "unseen"),
        node("Mul", "unseen low", "bias"),
    ]
    for i in range(layers):
        nodes += [
            node("MatMul", f"x{i} q{i}", f"queries{i}"),
            node("Transpose", f"x{i}", f"keys{i}", perm=[0, 2, 1]),
            node("MatMul", f"queries{i} keys{i}", f"scores{i}"),
            node("Add", f"scores{i} bias", f"biased{i}"),
            node("Softmax", f"biased{i}", f"shares{i}", axis=2),
            node("MatMul", f"shares{i} x{i}", f"values{i}"),
            node("MatMul", f"values{i} v{i}", f"mixed{i}"),
            node("Tanh", f"mixed{i}", f"x{i + 1}"),
        ]
    nodes.append(node("Identity", f"x{layers}", "tokens"))
    return save(
        path,
        nodes,
        [value("ids", "INT64", dims), value("mask", "INT64", dims)],
        [value("tokens", dims=[*dims, width])],
        {
            "table": generator.standard_normal((100, width)).astype(np.float32),
            "middle": np.array([1]),
            "one": np.float32(1),
            "low": np.float32(-1e4 if masked else 0),
            **{f"q{i}": weights[i, 0].astype(np.float32) for i in range(layers)},
            **{f"v{i}": weights[i, 1].astype(np.float32) for i in range(layers)},
        },
    )


def found(path: Path) -> Path:
    """at INT64 [2, found] = the positions where x is not 0; same = x."""
    return save(
        path,
        [node("NonZero", "x", "at"), node("Identity", "x", "same")],
        [value("x")],
        [value("at", "INT64", (2, "found")), value("same")],
    )


def endless(path: Path) -> Path:
    """A loop without a trip limit whose condition is always true."""
    body = helper.make_graph(
        [node("Identity", "going", "still_going"), node("Identity", "before", "after")],
        "body",
        [value("trip", "INT64", ()), value("going", "BOOL", ()), value("before")],
        [value("still_going", "BOOL", ()), value("after")],
    )
    loop = helper.make_node("Loop", ["", "true", "x"], ["y"], body=body)
    return save(path, [loop], [value("x")], [value("y")], {"true": True})


def streaming(path: Path, rows: int | str = 1) -> Path:
    """x [rows, 4] and state [2, rows, 4] → y [rows, 4] and next [2, rows, 4]: y = x + both states, next = state + x."""
    return save(
        path,
        [
            node("ReduceSum", "state axis", "s", keepdims=0),
            node("Add", "x s", "y"),
            node("Unsqueeze", "x axis", "u"),
            node("Add", "state u", "next"),
        ],
        [value("x", dims=[rows, 4]), value("state", dims=[2, rows, 4])],
        [value("y", dims=[rows, 4]), value("next", dims=[2, rows, 4])],
        {"axis": np.array([0])},
    )
