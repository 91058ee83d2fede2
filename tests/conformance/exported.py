"""Models as exporters make them, each with the expected verdict of the graph analysis.

Those of scikit-learn, LightGBM and XGBoost are files, made by exporters/make.py. The others are
written here in the style of PyTorch's exporter, and quantised by ONNX Runtime's tools.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from conformance.cases import Array
from onnx import numpy_helper, parser
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from support.models import hidden_mixing

from tensorferry.server.onnx.graph import RowMixing

_FILES = Path(__file__).parent / "exporters"
_HEADER = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1, "ai.onnx.ml" : 3]>'
_PROVED, _TESTED, _REFUSED = RowMixing.SEPARATE, RowMixing.UNKNOWN, RowMixing.MIXES


@dataclass(frozen=True, slots=True)
class Exported:
    """A model with some rows of its inputs, and the expected verdict."""

    name: str
    model: onnx.ModelProto
    rows: Mapping[str, Array]
    finding: RowMixing


@cache
def exported() -> Sequence[Exported]:
    """Return all of them."""
    return [*_from_files(), *_written(), *_quantised(), *_hidden()]


def _from_files() -> list[Exported]:
    found = []
    for path in sorted(_FILES.glob("*.onnx")):
        model = onnx.load(str(path))
        rows: Array = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
        finding = _PROVED
        if path.stem == "sklearn_categories":
            rows = np.array(
                [["a", "u"], ["b", "v"], ["c", ""], ["x", "u"], ["", "v"], ["a", "v"]], dtype=object
            )
        elif path.stem == "sklearn_text":
            words = ["red fox", "", "blue sky and more words", "red", "sky sky sky", "none of these"]
            rows = np.array(words, dtype=object).reshape(-1, 1)
            finding = _TESTED  # Its tokenizer is an operator of ONNX Runtime, padded to the longest text.
        found.append(Exported(path.stem, model, {"x": rows}, finding))
    return found


def parsed(text: str, **weights: Array) -> onnx.ModelProto:
    """Return a model in the text form of the onnx package, with weights."""
    model: onnx.ModelProto = parser.parse_model(f"{_HEADER}\n{text}")
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def _random(*shape: int) -> Array:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * 0.3).astype(np.float32)


def _ids(*shape: int) -> Array:
    return np.random.default_rng(7).integers(1, 9, shape)


def _ints(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


_CNN = """g (float[N, 3, 8, 8] x) => (float[N, 5] y) {
    a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
    b = BatchNormalization (a, scale, bias, mean, variance)
    c = Relu (b)
    d = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c, w2)
    e = Add (c, d)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (e)
    HEAD
    y = Gemm <transB = 1> (f, w3, b3)
}"""
_POOLED = "q = GlobalAveragePool (p) f = Flatten <axis = 1> (q)"
# x.view(x.size(0), -1)
_VIEWED = """s = Shape (p) n = Gather <axis = 0> (s, zero) n1 = Unsqueeze (n, axes0)
    t = Concat <axis = 0> (n1, minus1) f = Reshape (p, t)"""


def _cnn(head: str, features: int) -> onnx.ModelProto:
    weights = {
        "w1": _random(4, 3, 3, 3),
        "w2": _random(4, 4, 3, 3),
        "w3": _random(5, features),
        "b3": _random(5),
    }
    statistics = {name: np.abs(_random(4)) + 1 for name in ("scale", "bias", "mean", "variance")}
    shapes = {"zero": np.array(0, np.int64), "axes0": _ints(0), "minus1": _ints(-1)}
    return parsed(_CNN.replace("HEAD", head), **weights, **statistics, **shapes)


# As PyTorch writes attention with view, permute and expand, all sizes taken from shapes.
_ENCODER = """g (int64[batch, seq] ids, int64[batch, seq] mask) => (float[batch, 8] y) {
    words = Gather (table, ids)
    s = Shape (ids) n = Gather <axis = 0> (s, zero) l = Gather <axis = 0> (s, one)
    n1 = Unsqueeze (n, axes0) l1 = Unsqueeze (l, axes0)
    positions = Slice (all, axes0, l1, axes1)
    ps = Gather (places, positions)
    x = Add (words, ps)
    m = Unsqueeze (mask, axes12)
    shape = Concat <axis = 0> (n1, one1, l1, l1)
    ones = ConstantOfShape <value = int64[1] {1}> (four)
    negative = Mul (ones, minus1)
    same = Equal (shape, negative)
    wanted = Where (same, ones, shape)
    wide = Expand (m, wanted)
    mf = Cast <to = 1> (wide)
    inverse = Sub (onef, mf)
    as_bool = Cast <to = 9> (inverse)
    filled = Where (as_bool, lowest, inverse)
    split = Concat <axis = 0> (n1, l1, heads, width)
    q0 = MatMul (x, wq) q1 = Reshape (q0, split) q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k0 = MatMul (x, wk) k1 = Reshape (k0, split) k = Transpose <perm = [0, 2, 3, 1]> (k1)
    v0 = MatMul (x, wv) v1 = Reshape (v0, split) v = Transpose <perm = [0, 2, 1, 3]> (v1)
    w0 = MatMul (q, k) w1 = Div (w0, root) w2 = Add (w1, filled) w = Softmax <axis = 3> (w2)
    o0 = MatMul (w, v) o1 = Transpose <perm = [0, 2, 1, 3]> (o0)
    joined = Concat <axis = 0> (n1, l1, hidden) o = Reshape (o1, joined)
    r = Add (o, x)
    mean = ReduceMean <axes = [-1]> (r) d = Sub (r, mean) d2 = Pow (d, two)
    variance = ReduceMean <axes = [-1]> (d2) v3 = Add (variance, epsilon) v4 = Sqrt (v3)
    normal = Div (d, v4)
    flat = Reshape (normal, flat_shape)
    up = Gemm (flat, wup) ge = Erf (up) down = MatMul (ge, wdown)
    back = Reshape (down, joined)
    first = Gather <axis = 1> (back, zero)
    y = Tanh (first)
}"""


def _encoder() -> onnx.ModelProto:
    square = {name: _random(8, 8) for name in ("wq", "wk", "wv")}
    ints = {"axes0": _ints(0), "axes1": _ints(1), "axes12": _ints(1, 2), "one1": _ints(1), "four": _ints(4)}
    ints |= {"minus1": _ints(-1), "heads": _ints(2), "width": _ints(4), "hidden": _ints(8)}
    ints |= {"flat_shape": _ints(-1, 8), "zero": np.array(0, np.int64), "one": np.array(1, np.int64)}
    ints |= {"all": np.arange(512).reshape(1, 512)}
    floats = {"onef": 1.0, "lowest": -1e9, "root": 2.0, "two": 2.0, "epsilon": 1e-5}
    return parsed(
        _ENCODER,
        table=_random(9, 8),
        places=_random(512, 8),
        wup=_random(8, 16),
        wdown=_random(16, 8),
        **square,
        **ints,
        **{name: np.array(number, np.float32) for name, number in floats.items()},
    )


# As in torch.nn.MultiheadAttention: the sequence first, and heads and batch on one axis.
_SEQUENCE_FIRST = """g (float[batch, seq, 8] x) => (float[batch, seq, 8] y) {
    t = Transpose <perm = [1, 0, 2]> (x)
    s = Shape (t) l1 = Slice (s, axes0, ends1) n1 = Slice (s, ends1, ends2)
    nh = Mul (n1, heads)
    split = Concat <axis = 0> (l1, nh, width)
    q0 = MatMul (t, w) q1 = Reshape (q0, split) q = Transpose <perm = [1, 0, 2]> (q1)
    k = Transpose <perm = [0, 2, 1]> (q)
    w0 = MatMul (q, k) w1 = Softmax <axis = -1> (w0)
    o0 = MatMul (w1, q) o1 = Transpose <perm = [1, 0, 2]> (o0)
    ln = Mul (l1, n1) rows = Concat <axis = 0> (ln, hidden)
    o2 = Reshape (o1, rows) o3 = Gemm (o2, w)
    whole = Concat <axis = 0> (l1, n1, hidden)
    o4 = Reshape (o3, whole)
    y = Transpose <perm = [1, 0, 2]> (o4)
}"""

# batch_first=True, with initial states that torch.zeros makes from the batch size.
_LSTM = """g (float[batch, seq, 3] x) => (float[batch, 4] y) {
    t = Transpose <perm = [1, 0, 2]> (x)
    s = Shape (x) n = Gather <axis = 0> (s, zero) n1 = Unsqueeze (n, axes0)
    state = Concat <axis = 0> (one1, n1, four)
    h0 = ConstantOfShape (state)
    all, h, c = LSTM <hidden_size = 4> (t, w, r, b, , h0, h0)
    q = Squeeze (all, axes1)
    u = Transpose <perm = [1, 0, 2]> (q)
    y = Gather <axis = 1> (u, last)
}"""
_GRU = """g (float[batch, seq, 3] x, int64[batch] lengths) => (float[batch, 8] y) {
    t = Transpose <perm = [1, 0, 2]> (x)
    short = Cast <to = 6> (lengths)
    all, h = GRU <hidden_size = 4, direction = "bidirectional"> (t, w, r, b, short)
    u = Transpose <perm = [1, 0, 2]> (h)
    y = Reshape (u, flat)
}"""
# As CLIP selects the last token of each text: hidden[torch.arange(hidden.shape[0]),
# ids.argmax(-1)].
_OWN_TOKEN = """g (int64[batch, seq] x) => (float[batch, 8] y) {
    hidden = Gather (table, x)
    token = ArgMax <axis = -1, keepdims = 0> (x)
    s = Shape (hidden) n = Gather <axis = 0> (s, zero) numbers = Range (zero, n, one)
    both = Add (numbers, token) shape = Shape (both)
    wide = Expand (numbers, shape) column = Unsqueeze (wide, last)
    wide_token = Expand (token, shape) column_token = Unsqueeze (wide_token, last)
    indices = Concat <axis = -1> (column, column_token)
    y = GatherND (hidden, indices)
}"""
# Boxes and scores of all images in sequence; the number left of each depends on all.
_DETECTION = """g (float[batch, 6, 4] boxes, float[batch, 2, 6] scores) => (int64[left, 3] y) {
    y = NonMaxSuppression (boxes, scores, most, overlap, least)
}"""
# Whisper's front end: a floor below the largest value of the whole batch.
_LOG_MEL = """g (float[batch, samples] x) => (float[batch, frames, 4] y) {
    u = Unsqueeze (x, axes1)
    f = Conv <kernel_shape = [8], strides = [4]> (u, basis)
    p = Mul (f, f) t = Transpose <perm = [0, 2, 1]> (p) m = MatMul (t, mel)
    c = Clip (m, small) l = Log (c)
    peak = ReduceMax <keepdims = 0> (l)
    floor = Sub (peak, eight)
    y = Max (l, floor)
}"""
_FROM_TWO = """g (float[batch, 4] a, float[batch, 4] b) => (float[batch, 1] y) {
    both = Concat <axis = 0> (a, b)
    e = MatMul (both, w)
    u, v = Split <axis = 0> (e)
    p = Mul (u, v)
    y = ReduceSum (p, axes1)
}"""
_SIMILARITY = "g (float[batch, 4] x) => (float[batch, M] y) { t = Transpose (x) y = MatMul (x, t) }"
_BY_THE_GREATEST = """g (float[batch, 4] x) => (float[batch, 4] y) {
    peak = ReduceMax <keepdims = 0> (x) divisor = Max (peak, hundred) y = Div (x, divisor)
}"""
_BY_THE_MEAN = """g (float[batch, 4] x) => (float[batch, 4] y) {
    mean = ReduceMean <axes = [0]> (x) y = Sub (x, mean)
}"""
_TRAINING = """g (float[batch, 4] x) => (float[batch, 4] y) {
    y, m, v = BatchNormalization <training_mode = 1> (x, scale, bias, mean, variance)
}"""
_BY_THE_COUNT = """g (float[batch, 4] x) => (float[batch, 4] y) {
    s = Shape (x) n = Gather (s, zero) f = Cast <to = 1> (n) y = Div (x, f)
}"""
# torch.squeeze(x, 1), which PyTorch exports as an If for an axis that may be 1.
_SQUEEZED = """g (float[batch, 1, 4] x) => (float[batch, 4] y) {
    s = Shape (x) d = Gather <axis = 0> (s, one) c = Equal (d, one)
    z = If <then_branch = a () => (p) { p = Squeeze (x, axes1) }, else_branch = b () => (q) { q = Identity (x) }> (c)
    y = Relu (z)
}"""


def _written() -> list[Exported]:
    image, series, features = _random(6, 3, 8, 8), _random(6, 5, 3), _random(6, 4) * 500
    ids, mask = _ids(6, 5), np.tril(np.ones((6, 5), np.int64))
    zero, one, axes0, axes1 = np.array(0, np.int64), np.array(1, np.int64), _ints(0), _ints(1)
    lstm = {"w": _random(1, 16, 3), "r": _random(1, 16, 4), "b": _random(1, 32), "zero": zero, "axes0": axes0}
    lstm |= {"axes1": axes1, "one1": _ints(1), "four": _ints(4), "last": np.array(-1, np.int64)}
    gru = {"w": _random(2, 12, 3), "r": _random(2, 12, 4), "b": _random(2, 24), "flat": _ints(-1, 8)}
    first = {"axes0": axes0, "ends1": _ints(1), "ends2": _ints(2), "heads": _ints(2), "width": _ints(4)}
    first |= {"hidden": _ints(8), "w": _random(8, 8)}
    boxes = np.sort(np.abs(_random(6, 6, 4)), axis=-1)
    nms = {"most": _ints(3), "overlap": np.array([0.5], np.float32), "least": np.array([0.1], np.float32)}
    mel = {"axes1": axes1, "basis": _random(6, 1, 8), "mel": np.abs(_random(6, 4))}
    mel |= {"small": np.array(1e-10, np.float32), "eight": np.array(8, np.float32)}
    statistics = {name: np.abs(_random(4)) + 1 for name in ("scale", "bias", "mean", "variance")}
    waves = _random(6, 64) * np.array([[1], [1e-4], [10], [1], [1e-3], [100]], np.float32)
    hundred = np.array(100, np.float32)
    return [
        Exported("torch_cnn", _cnn(_POOLED, 4), {"x": image}, _PROVED),
        Exported("torch_cnn_view", _cnn(_VIEWED, 64), {"x": image}, _PROVED),
        Exported("transformer_encoder", _encoder(), {"ids": ids, "mask": mask}, _PROVED),
        Exported(
            "transformer_sequence_first", parsed(_SEQUENCE_FIRST, **first), {"x": _random(6, 5, 8)}, _PROVED
        ),
        Exported("lstm", parsed(_LSTM, **lstm), {"x": series}, _PROVED),
        Exported("gru", parsed(_GRU, **gru), {"x": series, "lengths": _ints(5, 3, 1, 2, 4, 5)}, _PROVED),
        Exported(
            "siamese",
            parsed(_FROM_TWO, w=_random(4, 4), axes1=axes1),
            {"a": features, "b": features},
            _PROVED,
        ),
        Exported("squeeze", parsed(_SQUEEZED, one=one, axes1=axes1), {"x": _random(6, 1, 4)}, _PROVED),
        Exported(
            "own_token",
            parsed(_OWN_TOKEN, table=_random(9, 8), zero=zero, one=one, last=_ints(-1)),
            {"x": ids},
            _PROVED,
        ),
        Exported(
            "detection_nms",
            parsed(_DETECTION, **nms),
            {"boxes": boxes, "scores": np.abs(_random(6, 2, 6))},
            _TESTED,
        ),
        Exported("log_mel", parsed(_LOG_MEL, **mel), {"x": waves}, _REFUSED),
        Exported("similarity_matrix", parsed(_SIMILARITY), {"x": features}, _REFUSED),
        Exported("by_the_greatest", parsed(_BY_THE_GREATEST, hundred=hundred), {"x": features}, _REFUSED),
        Exported("by_the_mean", parsed(_BY_THE_MEAN), {"x": features}, _REFUSED),
        Exported("batch_norm_training", parsed(_TRAINING, **statistics), {"x": features}, _REFUSED),
        Exported("by_the_count", parsed(_BY_THE_COUNT, zero=zero), {"x": features}, _REFUSED),
    ]


class _Calibration(CalibrationDataReader):  # type: ignore[misc]
    """Yields the rows one by one."""

    def __init__(self, rows: Mapping[str, Array]) -> None:
        count = len(next(iter(rows.values())))
        self._left = iter([{name: array[at : at + 1] for name, array in rows.items()} for at in range(count)])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._left, None)


def _quantised() -> list[Exported]:
    rows = {"x": _random(6, 3, 8, 8)}
    model = _cnn(_POOLED, 4)
    with tempfile.TemporaryDirectory() as folder:
        given, made = f"{folder}/given.onnx", f"{folder}/made.onnx"
        onnx.save(model, given)
        found = []
        for name, form in (("static_qdq", QuantFormat.QDQ), ("static_operators", QuantFormat.QOperator)):
            quantize_static(given, made, _Calibration(rows), quant_format=form)
            found.append(Exported(f"quantised_{name}", onnx.load(made), rows, _PROVED))
        quantize_dynamic(given, made)
        return [*found, Exported("quantised_dynamic", onnx.load(made), rows, _REFUSED)]


def _hidden() -> list[Exported]:
    """Return models that mix rows only for few numbers, by each operator that mixes rows by its nature."""
    rows = _random(6, 4)
    rows[::2, 0] = hidden_mixing.MIXING
    return [
        Exported(f"hidden_{kind}", hidden_mixing.model(kind), {"x": rows}, _REFUSED)
        for kind in hidden_mixing.KINDS
    ]
