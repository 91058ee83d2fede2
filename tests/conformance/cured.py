"""Models whose requests do not share batches, each with the model that its cure leads to.

What `tensorferry inspect` advises is done here, in the graph as a change of the training code or of the
export would do it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from conformance.exported import exported, parsed
from onnx import helper, numpy_helper
from support.models import extensions


@dataclass(frozen=True, slots=True)
class Cured:
    """A model, and the same after its cure. `word` is in the cure that the loader names.

    `before` and `after` are verdicts; `before` is "not loaded" if the model cannot be served at all. `changed` says
    what was done. `options` are those of the server with which the cured model is inspected.
    """

    name: str
    model: onnx.ModelProto
    before: str
    word: str
    changed: str
    cured: onnx.ModelProto
    after: str = "proved"
    options: Mapping[str, Any] = field(default_factory=dict)


def cured_models() -> list[Cured]:
    """Return all of them."""
    return [*_of_exporters(), *_own(), *_classifiers(), *_with_libraries()]


def _changed(model: onnx.ModelProto, change: Callable[[onnx.GraphProto], None]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    change(copy.graph)
    return copy


def _node(graph: onnx.GraphProto, operator: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == operator)


def _set(node: onnx.NodeProto, **attributes: object) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name not in attributes]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(*pair) for pair in attributes.items())])


def _output(name: str, *dims: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims)


def _own_peak(graph: onnx.GraphProto) -> None:
    """Let the peak be that of each row."""
    axes = {"l": [1, 2], "x": [1]}[_node(graph, "ReduceMax").input[0]]
    _set(_node(graph, "ReduceMax"), axes=axes, keepdims=1)


def _evaluated(graph: onnx.GraphProto) -> None:
    """Let normalisation use the statistics of training."""
    node = _node(graph, "BatchNormalization")
    _set(node, training_mode=0)
    del node.output[1:]


def _without_nms(graph: onnx.GraphProto) -> None:
    """Return boxes and scores."""
    del graph.node[:]
    graph.node.extend([helper.make_node("Identity", [name], [f"raw_{name}"]) for name in ("boxes", "scores")])
    del graph.output[:]
    graph.output.extend([_output("raw_boxes", "batch", 6, 4), _output("raw_scores", "batch", 2, 6)])


def _of_rows(graph: onnx.GraphProto) -> None:
    """Return each row's own result instead of its products with all rows."""
    del graph.node[:]
    graph.node.append(helper.make_node("LpNormalization", ["x"], ["y"], axis=1))
    del graph.output[:]
    graph.output.append(_output("y", "batch", 4))


def _constant_divisor(graph: onnx.GraphProto) -> None:
    """Divide by a number."""
    graph.initializer.append(numpy_helper.from_array(np.array(8, np.float32), "eight"))
    _node(graph, "Div").input[1] = "eight"


def _of_exporters() -> list[Cured]:
    """Return the models of exported.py that are not batched."""
    models = {one.name: one.model for one in exported()}

    def mean(graph: onnx.GraphProto) -> None:
        _set(_node(graph, "ReduceMean"), axes=[1])

    def made(name: str, word: str, changed: str, change: Callable[[onnx.GraphProto], None]) -> Cured:
        return Cured(name, models[name], "refused", word, changed, _changed(models[name], change))

    static = models["quantised_static_qdq"]
    return [
        made("log_mel", "x.mean(dim=1)", "the peak of each row", _own_peak),
        made("by_the_greatest", "x.mean(dim=1)", "the peak of each row", _own_peak),
        made("by_the_mean", "x.mean(dim=1)", "the mean of each row", mean),
        made("batch_norm_training", "model.eval()", "evaluation mode", _evaluated),
        made("by_the_count", "x.shape[0]", "a constant divisor", _constant_divisor),
        made("similarity_matrix", "compare the results behind", "a vector of each row", _of_rows),
        made("detection_nms", "without NMS", "boxes and scores", _without_nms),
        Cured("quantised_dynamic", models["quantised_dynamic"], "refused", "quantize_static", "static quantisation", static),
    ]  # fmt: skip


_X = "g (float[batch, 4] x) => (float[batch, 4] y)"
_SOFTMAX = _X + " { y = Softmax <axis = 0> (x) }"
_FIRST = "g (float[batch, 4] x) => (float[k, 4] y) { f = Gather <axis = 0> (x, zero) y = Mul (x, f) }"
_SQUEEZE = "g (float[batch, 1, 4] x) => (float[batch, 4] y) { y = Squeeze (x) }"
_CONSTANT = (
    "g (float[batch, 4] x) => (float[batch, 4] y, float[k, 4] z) { y = Relu (x) z = Identity (table) }"
)
_JOINED = "g (float[batch, 4] x) => (float[more, 4] y) { y = Concat <axis = 0> (x, token) }"
_JOINED_BEHIND = """g (float[batch, 4] x) => (float[batch, 8] y) {
    s = Shape (x) wide = Expand (token, s) y = Concat <axis = 1> (x, wide)
}"""
_SUMMED = _X + " { y = CumSum (x, axis) }"
_RANDOM = _X + " { n = RandomNormalLike (x) y = Add (x, n) }"
_NOISE_GIVEN = "g (float[batch, 4] x, float[batch, 4] n) => (float[batch, 4] y) { y = Add (x, n) }"
_SELECTED = "g (float[batch, 4] x) => (int64[two, found] y) { y = NonZero (x) }"
_MASKED = _X + " { c = Greater (x, nothing) y = Where (c, x, nothing) }"
_VIEWED = "g (float[batch, 4] x) => (float[half, 8] y) { y = Reshape (x, pairs) }"
_RECURRENT = (
    "g (float[batch, seq, 3] x) => (float[batch, one, seq, 4] y) { y, h = GRU <hidden_size = 4> (x, w, r) }"
)
_BATCH_FIRST = """g (float[batch, seq, 3] x) => (float[batch, seq, 4] y) {
    t = Transpose <perm = [1, 0, 2]> (x) a, h = GRU <hidden_size = 4> (t, w, r)
    q = Squeeze (a, one) y = Transpose <perm = [1, 0, 2]> (q)
}"""
_SCALAR = "g (float[batch, 4] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }"
_KEPT_SUM = "g (float[batch, 4] x) => (float[batch, 1] y) { y = ReduceSum <keepdims = 1> (x, one) }"


def _own() -> list[Cured]:
    four, one, zero = np.ones((1, 4), np.float32), np.array([1]), np.array(0)
    weights = {"w": np.ones((1, 12, 3), np.float32), "r": np.ones((1, 12, 4), np.float32)}
    nothing, table = np.array(0, np.float32), np.ones((3, 4), np.float32)
    named = _SQUEEZE.replace("(x) }", "(x, one) }")
    columns = _X + " { f = Gather <axis = 1> (x, zero) y = Mul (x, f) }"
    variable = _FIXED.replace("ROWS", "batch")
    rows = [
        ("softmax_over_the_batch", parsed(_SOFTMAX), "refused", "softmax(dim=-1)",
         "softmax of each row", parsed(_SOFTMAX.replace("axis = 0", "axis = 1"))),
        ("sum_along_the_batch", parsed(_SUMMED, axis=zero), "refused", "x.mean(dim=1)",
         "sum along each row", parsed(_SUMMED, axis=np.array(1))),
        ("first_row_alone", parsed(_FIRST, zero=zero), "refused", "x[:, 0]",
         "first element of each row", parsed(columns, zero=np.array([0]))),
        ("squeeze_without_axes", parsed(_SQUEEZE), "refused", "x.squeeze(1)", "axis 1 named", parsed(named, one=one)),
        ("constant_output", parsed(_CONSTANT, table=table), "off", "leave this output out",
         "without the output", parsed(_X + " { y = Relu (x) }")),
        ("joined_along_the_batch", parsed(_JOINED, token=four), "refused", "torch.cat(..., dim=1)",
         "joined along axis 1", parsed(_JOINED_BEHIND, token=four)),
        ("random_noise", parsed(_RANDOM), "refused", "noise as an input", "noise as an input", parsed(_NOISE_GIVEN)),
        ("non_zero", parsed(_SELECTED), "off", "masks and torch.where", "a mask", parsed(_MASKED, nothing=nothing)),
        ("view_across_rows", parsed(_VIEWED, pairs=np.array([-1, 8])), "refused", "torch.flatten(x, 1)",
         "a row for each row", parsed(_X + " { y = Reshape (x, own) }", own=np.array([0, 4]))),
        ("recurrent_along_the_batch", parsed(_RECURRENT, **weights), "refused", "batch_first=True",
         "batch_first", parsed(_BATCH_FIRST, one=one, **weights)),
        ("scalar_sum", parsed(_SCALAR), "off", "compute over the axes of one row",
         "a sum of each row", parsed(_KEPT_SUM, one=one)),
        ("fixed_axis_of_4", parsed(_FIXED.replace("ROWS", "4"), flat=np.array([0, 8])), "off",
         "export it with a variable first axis", "variable axis", parsed(variable, flat=np.array([0, 8]))),
        ("fixed_reshape", parsed(variable, flat=np.array([1, 8])), "off", "torch.flatten(x, 1)",
         "sizes from the input", parsed(variable, flat=np.array([-1, 8]))),
    ]  # fmt: skip
    return [Cured(*row) for row in rows]


_FIXED = "g (float[ROWS, 2, 4] x) => (float[ROWS, 8] y) { y = Reshape (x, flat) }"


def _classifiers() -> list[Cured]:
    """Return a classifier as skl2onnx writes it by default, and without ZipMap."""
    without = next(one.model for one in exported() if one.name == "sklearn_logistic")
    zipped = onnx.ModelProto()
    zipped.CopyFrom(without)
    graph = zipped.graph
    kind = helper.make_map_type_proto(
        onnx.TensorProto.INT64, helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
    )
    sequence = helper.make_sequence_type_proto(kind)
    probabilities = next(one for one in graph.output if "prob" in one.name)
    graph.node.append(
        helper.make_node(
            "ZipMap", [probabilities.name], ["zipped"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]
        )
    )
    graph.output.remove(probabilities)
    graph.output.append(helper.make_value_info("zipped", sequence))
    return [Cured("sklearn_zipmap", zipped, "not loaded", "'zipmap': False", "zipmap=False", without)]


def _with_libraries() -> list[Cured]:
    """Return a tokenizer in the graph, whose operator is in a library."""
    with tempfile.TemporaryDirectory() as folder:
        model = onnx.load(str(extensions.tokenizer(Path(folder) / "m.onnx")))
    option = "--custom-ops onnxruntime-extensions"
    library = {"custom_ops": ("onnxruntime-extensions",)}
    return [Cured("own_operator", model, "not loaded", option, option, model, "tested", library)]


def saved(model: onnx.ModelProto, name: str, folder: Path) -> Path:
    """Write a model to a folder; return its path."""
    path = folder / f"{name}.onnx"
    onnx.save(model, str(path))
    return path
