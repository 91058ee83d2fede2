"""Small ONNX models, each with one property that a test needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

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
    *,
    check: bool = True,
) -> Path:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, tensors)
    domains = [helper.make_opsetid(domain, 1) for domain in {one.domain for one in nodes} - {""}]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), *domains], ir_version=9)
    if check:
        onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def written(
    path: Path, text: str, *, names: Mapping[int, str] | None = None, check: bool = True, **constants: Any
) -> Path:
    """Save the graph of a text: its inputs => its outputs { its nodes }. `names` has names of nodes, by position."""
    graph: onnx.GraphProto = parser.parse_graph(f"g {text}")
    for position, name in (names or {}).items():
        graph.node[position].name = name
    return save(path, graph.node, graph.input, graph.output, constants, check=check)


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


def keeping(path: Path) -> Path:
    """y = x + past, which is also next; for models that keep a state."""
    text = "(float[batch, 3] x, float[batch, 3] past) => (float[batch, 3] y, float[batch, 3] next)"
    return written(path, text + "{ y = Add (x, past) next = Identity (y) }")


def halved(path: Path, datatype: str) -> Path:
    """x [batch, n] of any datatype but BYTES → y = x / 2, computed in FP32."""
    nodes = [
        node("Cast", "x", "number", to=TensorProto.FLOAT),
        node("Mul", "number half", "less"),
        node("Cast", "less", "y", to=ELEMENT[datatype]),
    ]
    x, y = (value(name, datatype, ("batch", "n")) for name in "xy")
    return save(path, nodes, [x], [y], {"half": np.float32(0.5)})


def wide(path: Path, width: int) -> Path:
    """x FP32 [batch, 1] → y [batch] = x, computed through copies of each number."""
    text = """(float[batch, 1] x) => (float[batch] y) {
        copies = Mul (x, ones) y = ReduceMax <axes = [1], keepdims = 0> (copies)
    }"""
    return written(path, text, ones=np.ones((1, width), np.float32))


def mlp(path: Path, dtype: type[np.floating[Any]] = np.float32) -> Path:
    """x [batch, 8] → p [batch, 4]: a softmax over each row's scores."""
    generator = np.random.default_rng(1)
    kind = {np.float16: "float16", np.float32: "float", np.float64: "double"}[dtype]
    text = f"""({kind}[batch, 8] x) => ({kind}[batch, 4] p) {{
        h = MatMul (x, w) r = Relu (h) s = MatMul (r, v) p = Softmax <axis = 1> (s)
    }}"""
    w, v = (generator.standard_normal(shape).astype(dtype) for shape in ((8, 16), (16, 4)))
    return written(path, text, w=w, v=v)


def conv(path: Path) -> Path:
    """image [batch, 1, h, w], at least 5 × 5 → label INT64 [batch], score FP32 [batch, 2]."""
    text = """(float[batch, 1, h, w] image) => (int64[batch] label, float[batch, 2] score) {
        maps = Conv (image, kernels) pooled = GlobalAveragePool (maps) score = Flatten (pooled)
        label = ArgMax <axis = 1, keepdims = 0> (score)
    }"""
    kernels = np.random.default_rng(2).standard_normal((2, 1, 5, 5)).astype(np.float32)
    return written(path, text, kernels=kernels)


def reshaped_conv(path: Path) -> Path:
    """Like `conv`, with only the label as output."""
    model = onnx.load(str(conv(path)))
    del model.graph.output[1]
    onnx.save(model, str(path))
    return path


_X = "(float[batch, 3] x)"
_X_TO_Y = f"{_X} => (float[batch, 3] y)"


def softmax_over_rows(path: Path) -> Path:
    """fine = x; share = softmax of x over the batch."""
    outputs = "(float[batch, 3] fine, float[batch, 3] share)"
    return written(path, f"{_X} => {outputs} {{ fine = Identity (x) share = Softmax <axis = 0> (x) }}")


def centred(path: Path) -> Path:
    """y = x - mean of x over the batch."""
    return written(
        path, f"{_X_TO_Y} {{ mean = ReduceMean <axes = [0], keepdims = 1> (x) y = Sub (x, mean) }}"
    )


def running_sum(path: Path) -> Path:
    """y = cumulative sum of x over the batch: each row depends on the rows before it."""
    return written(path, f"{_X_TO_Y} {{ y = CumSum (x, axis) }}", axis=np.int64(0))


def total(path: Path) -> Path:
    """y [k, 3] = sum of x over the batch: one row, although k is declared as variable."""
    return written(
        path, f"{_X} => (float[k, 3] y) {{ y = ReduceSum <keepdims = 1> (x, axes) }}", axes=np.array([0])
    )


def noisy(path: Path) -> Path:
    """y = random numbers with the shape of x."""
    return written(path, f"{_X_TO_Y} {{ y = RandomNormalLike (x) }}")


def multiples_only(path: Path, of: int) -> Path:
    """x [batch, n], n a multiple of `of` → y [batch, parts]: sums of `of` numbers each."""
    text = """(float[batch, n] x) => (float[batch, parts] y) {
        grouped = Reshape (x, sizes) y = ReduceSum <keepdims = 0> (grouped, axes)
    }"""
    return written(path, text, sizes=np.array([0, -1, of]), axes=np.array([2]))


def one_row_only(path: Path) -> Path:
    """y = x; more than one row raises."""
    text = f"""{_X_TO_Y} {{
        rows = Shape <start = 0, end = 1> (x) zero = Gather (zeros, rows) y = Add (x, zero)
    }}"""
    return written(path, text, zeros=np.zeros(2, np.float32))


def squeezed(path: Path) -> Path:
    """y = x; the analysis of the graph cannot tell whether the rows mix."""
    return written(path, f"{_X_TO_Y} {{ flat = Squeeze (x) shape = Shape (x) y = Reshape (flat, shape) }}")


def lookup(path: Path, size: int = 10) -> Path:
    """index INT64 [batch] → y FP32 [batch, 1] = index; an index of at least `size` raises."""
    table = np.arange(size, dtype=np.float32).reshape(size, 1)
    text = "(int64[batch] index) => (float[batch, 1] y) { y = Gather (table, index) }"
    return written(path, text, names={0: "/a/place/in/the/model"}, table=table)


def without_stop_words(path: Path, words: Sequence[str] = ("the", "a"), dims: Dims = ("batch",)) -> Path:
    """x BYTES [batch] → y, the elements in lower case, without stop words."""
    # An empty list would have no type.
    stop = {"stopwords": words} if words else {}
    lower = node("StringNormalizer", "x", "y", case_change_action="LOWER", locale="C", **stop)
    return save(path, [lower], [value("x", "BYTES", dims)], [value("y", "BYTES", dims)])


def spelt(path: Path) -> Path:
    """x BYTES [batch] → y FP32, the number that each string spells; the file also has an unused table of words."""
    text = "(string[batch] x) => (float[batch] y) { y = Cast <to = 1> (x) words = Identity (table) }"
    return written(path, text, table=np.array(["one", "two"], dtype=object))


def added(path: Path) -> Path:
    """y = a + b; only the run compares their shapes."""
    return written(path, "(float[batch, n] a, float[batch, n] b) => (float[batch, n] y) { y = Add (a, b) }")


def sequence(path: Path) -> Path:
    """x → a sequence of tensors, which the protocol does not have."""
    output = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    return save(path, [node("SequenceConstruct", "x", "y")], [value("x")], [output])


def masked_mean(path: Path, tokens: str = "sequence") -> Path:
    """ids, mask INT64 [batch, sequence] → tokens FP32 [batch, sequence, 4], their mean over the mask [batch, 4].

    tokens = table[ids] of 100 ids. The mean does not depend on padding, because the mask excludes it.
    `tokens` is the name of the axis in the outputs.
    """
    text = f"""(int64[batch, sequence] ids, int64[batch, sequence] mask) =>
            (float[batch, {tokens}, 4] tokens, float[batch, 4] mean) {{
        tokens = Gather (table, ids) weights = Cast <to = 1> (mask) spread = Unsqueeze (weights, last)
        weighted = Mul (tokens, spread) summed = ReduceSum <keepdims = 0> (weighted, axis)
        count = ReduceSum <keepdims = 1> (weights, axis) mean = Div (summed, count)
    }}"""
    table = np.random.default_rng(3).standard_normal((100, 4)).astype(np.float32)
    return written(path, text, table=table, last=np.array([2]), axis=np.array([1]))


def mean_of_numbers(path: Path) -> Path:
    """ids, mask INT64 [batch, sequence] → mean FP32 [batch], that of the ids over the mask."""
    text = """(int64[batch, sequence] ids, int64[batch, sequence] mask) => (float[batch] mean) {
        numbers = Cast <to = 1> (ids) weights = Cast <to = 1> (mask) weighted = Mul (numbers, weights)
        summed = ReduceSum <keepdims = 0> (weighted, axis) count = ReduceSum <keepdims = 0> (weights, axis)
        mean = Div (summed, count)
    }"""
    return written(path, text, axis=np.array([1]))


def plain_mean(path: Path) -> Path:
    """x FP32 [batch, sequence, 2] → y [batch, 2], the mean over the sequence, including padding."""
    text = "(float[batch, sequence, 2] x) => (float[batch, 2] y) { y = ReduceMean <axes = [1], keepdims = 0> (x) }"
    return written(path, text)


def with_positions(path: Path, most: int = 20) -> Path:
    """x FP32 [batch, sequence] → y = x + position, with at most `most` positions; longer rows raise."""
    text = """(float[batch, sequence] x) => (float[batch, sequence] y) {
        end = Shape <start = 1, end = 2> (x) end_scalar = Squeeze (end)
        positions = Range (first, end_scalar, step) embedded = Gather (table, positions) y = Add (x, embedded)
    }"""
    return written(path, text, first=np.int64(0), step=np.int64(1), table=np.arange(most, dtype=np.float32))


def attention(path: Path) -> Path:
    """ids, mask INT64 [batch, sequence] → tokens FP32 [batch, sequence, 8]: self-attention. Positions with mask 0 have no weight."""
    generator = np.random.default_rng(4)
    q, v = (generator.standard_normal((2, 8, 8)) / np.sqrt(8)).astype(np.float32)
    table = generator.standard_normal((100, 8)).astype(np.float32)
    text = """(int64[batch, sequence] ids, int64[batch, sequence] mask) => (float[batch, sequence, 8] tokens) {
        x = Gather (table, ids) weight = Cast <to = 1> (mask) seen = Unsqueeze (weight, middle)
        unseen = Sub (one, seen) bias = Mul (unseen, low)
        queries = MatMul (x, q) keys = Transpose <perm = [0, 2, 1]> (x)
        scores = MatMul (queries, keys) biased = Add (scores, bias)
        shares = Softmax <axis = 2> (biased) values = MatMul (shares, x)
        mixed = MatMul (values, v) tokens = Tanh (mixed)
    }"""
    numbers: dict[str, Any] = {"one": np.float32(1), "low": np.float32(-1e4)}
    return written(path, text, table=table, q=q, v=v, middle=np.array([1]), **numbers)


def found(path: Path) -> Path:
    """at INT64 [2, found] = the positions where x is not 0; same = x."""
    return written(
        path, f"{_X} => (int64[2, found] at, float[batch, 3] same) {{ at = NonZero (x) same = Identity (x) }}"
    )


def endless(path: Path) -> Path:
    """A loop of the most trips that can be, whose condition is always true."""
    body = "b (int64 trip, bool going, float[batch, 3] before) => (bool still_going, float[batch, 3] after)"
    nodes = "{ still_going = Identity (going) after = Identity (before) }"
    return written(
        path,
        f"{_X_TO_Y} {{ y = Loop <body = {body} {nodes}> (most, true_, x) }}",
        most=np.iinfo(np.int64).max,
        true_=True,
    )


def streaming(path: Path, rows: int | str = 1) -> Path:
    """x [rows, 4] and state [2, rows, 4] → y [rows, 4] and next [2, rows, 4]: y = x + both states, next = state + x."""
    text = f"""(float[{rows}, 4] x, float[2, {rows}, 4] state) => (float[{rows}, 4] y, float[2, {rows}, 4] next) {{
        s = ReduceSum <keepdims = 0> (state, axis) y = Add (x, s) u = Unsqueeze (x, axis) next = Add (state, u)
    }}"""
    return written(path, text, axis=np.array([0]))


def totals(path: Path, width: int = 40_000) -> Path:
    """x [batch, 1] and past [batch, width] → y [batch, 1], the last of past and x, and next [batch, width], past and x."""
    text = f"""(float[batch, 1] x, float[batch, {width}] past) => (float[batch, 1] y, float[batch, {width}] next) {{
        next = Add (past, x) y = Slice (next, start, end, axis)
    }}"""
    return written(path, text, start=np.array([width - 1]), end=np.array([width]), axis=np.array([1]))
