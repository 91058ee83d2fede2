"""`make batching-evidence`: the graph analysis compared with runs, for random combinations of
operators.

Prints how many graphs are proved, tested and refused; the exit status is 1 if one that mixes rows
is proved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from conformance.batching import Compared, Model, compare, report
from conformance.cases import session_of
from conformance.drawn.drawing import FLOAT, ROWS, Drawing
from onnx import TensorProto, numpy_helper, parser

_MOST_NODES = 7
_MOST_ELEMENTS = 512
# Exporters' value for the end of an axis.
_END = (1 << 63) - 1


Maker = Callable[[Drawing], str]


def _with_constant(draw: Drawing) -> str:
    name = draw.any()
    shape = draw.shapes[name]
    tail = shape[draw.random.randrange(len(shape) + 1) :]
    given = draw.weights(*(size if draw.chance(0.7) else 1 for size in tail))
    pair = [name, given] if draw.chance(0.5) else [given, name]
    return draw.one_of("Add Mul Sub Max", *pair)


def _softmax(draw: Drawing) -> str:
    name = draw.any()
    kind = draw.choice("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")
    return draw.node(kind, name, axis=draw.axis(name))


def _reduce(draw: Drawing) -> str:
    name = draw.any()
    kind = draw.choice("ReduceMax", "ReduceMean", "ReduceMin", "ReduceL2", "ReduceProd")
    keep = draw.random.randrange(2)
    rank = len(draw.shapes[name])
    if draw.chance(0.1) or not rank:
        return draw.node(kind, name, keepdims=keep)
    axes = sorted({draw.random.randrange(rank) for _ in range(draw.choice(1, 1, 2))})
    if draw.chance(0.3):
        return draw.node("ReduceSum", name, draw.ints(*axes), keepdims=keep)
    return draw.node(kind, name, axes=axes, keepdims=keep)


def _arg(draw: Drawing) -> str:
    name = draw.any()
    found = draw.node(draw.choice("ArgMax", "ArgMin"), name, axis=draw.axis(name), keepdims=1)
    return draw.node("Cast", found, to=FLOAT)


def _transpose(draw: Drawing) -> str:
    name = draw.any()
    order = list(range(len(draw.shapes[name])))
    draw.random.shuffle(order)
    return draw.node("Transpose", name, perm=order)


def _reshape(draw: Drawing) -> str:
    name = draw.any()
    shape = list(draw.shapes[name])
    way = draw.random.randrange(5)
    if way == 0:
        target = [-1, *shape[1:]] if draw.chance(0.5) else [0, -1]
    elif way == 1 and len(shape) > 1:
        target = [-1, *shape[2:]]
    elif way == 2:
        elements = int(np.prod(shape)) // ROWS
        first = draw.choice(*([one for one in range(1, elements + 1) if elements % one == 0] or [1]))
        target = draw.choice([-1, first], [first, -1], [-1, elements // first, first], [1, -1, first])
    elif way == 3:
        target = [*shape[:-1], 1, -1] if shape else [1]
        if target[0] == ROWS and draw.chance(0.7):
            target[0] = 0
    else:
        target = [-1]
    return draw.node("Reshape", name, draw.ints(*target), allowzero=0)


def _reshape_by_shape(draw: Drawing) -> str:
    """Add a Reshape as exporters write it: sizes taken from shapes, multiplied and joined."""
    name, other = draw.any(), draw.any()
    sizes = draw.node("Shape", other)
    first = draw.node("Gather", sizes, draw.ints(draw.choice(0, 0, 1, -1)), axis=0)
    way = draw.random.randrange(4)
    if way == 0:
        rest = [draw.ints(-1)]
    elif way == 1:
        rest = [draw.ints(draw.choice(1, 2, 3)), draw.ints(-1)]
    elif way == 2:
        first = draw.node("Mul", first, draw.node("Gather", sizes, draw.ints(draw.choice(0, 1)), axis=0))
        rest = [draw.ints(-1)]
    else:
        rest = [draw.node("Slice", sizes, draw.ints(1), draw.ints(_END), draw.ints(0))]
    return draw.node("Reshape", name, draw.node("Concat", first, *rest, axis=0))


def _squeeze(draw: Drawing) -> str:
    name = draw.any()
    shape = draw.shapes[name]
    ones = [axis for axis, size in enumerate(shape) if size == 1]
    if ones and draw.chance(0.5):
        return draw.node("Squeeze", name, draw.ints(draw.choice(*ones)))
    return draw.node("Unsqueeze", name, draw.ints(draw.random.randrange(len(shape) + 1)))


def _concat(draw: Drawing) -> str:
    name, other = draw.any(), draw.any()
    if draw.chance(0.3):
        other = draw.weights(*draw.shapes[name])
    return draw.node("Concat", name, other, axis=draw.axis(name))


_SLICES = ((0, 1, 1), (1, _END, 1), (0, -1, 1), (-1, -_END, -1), (0, _END, 2), (0, _END, 1))


def _slice(draw: Drawing) -> str:
    name = draw.any()
    axis = draw.axis(name)
    start, end, step = draw.choice(*_SLICES)
    return draw.node("Slice", name, draw.ints(start), draw.ints(end), draw.ints(axis), draw.ints(step))


def _clipped(draw: Drawing, name: str, most: float) -> str:
    """Add the integers from 0 to `most` that are nearest to the numbers of a value."""
    clipped = draw.node("Clip", draw.node("Abs", name), draw.constant(0.0), draw.constant(most))
    return draw.node("Cast", clipped, to=TensorProto.INT64)


def _gather(draw: Drawing) -> str:
    name = draw.any()
    axis = draw.axis(name)
    if draw.chance(0.4):
        # Use values as indices into a table of constants.
        table = draw.weights(5, *([2] * draw.random.randrange(2)))
        return draw.node("Gather", table, _clipped(draw, draw.any(), 4.0), axis=0)
    indices = draw.choice([0], [0, 0], [1, 0], [[0, 1]], 0)
    return draw.node("Gather", name, draw.constant(indices, np.int64), axis=axis)


def _gather_by_values(draw: Drawing) -> str:
    name, by = draw.any(), draw.any()
    indices = _clipped(draw, by, 1.0)
    if draw.chance(0.6):
        return draw.node("GatherElements", name, indices, axis=draw.axis(name))
    return draw.node("GatherND", name, indices, batch_dims=draw.choice(0, 0, 1))


def _scatter(draw: Drawing) -> str:
    name = draw.any()
    shape = draw.shapes[name]
    zeros = draw.constant(np.zeros(shape), np.int64)
    updates = name if draw.chance(0.5) else draw.weights(*shape)
    return draw.node("ScatterElements", name, zeros, updates, axis=draw.axis(name))


def _matmul(draw: Drawing) -> str:
    name = draw.any()
    shape = draw.shapes[name]
    way = draw.random.randrange(4)
    if way == 0:
        return draw.node("MatMul", name, draw.weights(shape[-1], 3))
    if way == 1 and len(shape) > 1:
        return draw.node("MatMul", draw.weights(2, shape[-2]), name)
    if way == 2:
        order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        return draw.node("MatMul", name, draw.node("Transpose", name, perm=order))
    return draw.node("MatMul", name, draw.any())


def _gemm(draw: Drawing) -> str:
    name = draw.any()
    shape = draw.shapes[name]
    turned = draw.random.randrange(2)
    return draw.node("Gemm", name, draw.weights(shape[0] if turned else shape[-1], 3), transA=turned)


_EQUATIONS = "ab,ab->a ab,cb->ac ab,bc->ac abc,abd->acd abc,adc->abd ab->ba ab->b abc->acb ab,ab->ab"


def _einsum(draw: Drawing) -> str:
    name, other = draw.any(), draw.any()
    equation = draw.choice(*_EQUATIONS.split())
    return draw.node("Einsum", *([name, other] if "," in equation else [name]), equation=equation)


def _pad(draw: Drawing) -> str:
    name = draw.any()
    pads = [0] * 2 * len(draw.shapes[name])
    pads[draw.random.randrange(len(pads))] = 1
    mode = draw.choice("constant", "edge", "reflect")
    return draw.node("Pad", name, draw.ints(*pads), mode=mode)


def _tile(draw: Drawing) -> str:
    name = draw.any()
    repeats = [1] * len(draw.shapes[name])
    repeats[draw.random.randrange(len(repeats))] = 2
    return draw.node("Tile", name, draw.ints(*repeats))


def _cumsum(draw: Drawing) -> str:
    name = draw.any()
    axis = draw.constant(draw.axis(name), np.int64)
    return draw.node("CumSum", name, axis, reverse=draw.random.randrange(2))


def _of_two(kind: str, *more: Any) -> Maker:
    """Return a maker of a node with two outputs."""

    def make(draw: Drawing) -> str:
        name = draw.any()
        found = draw.node(kind, name, *(draw.ints(*one) for one in more), axis=draw.axis(name))
        draw.nodes[-1].output.append(f"{found}_more")
        return found

    return make


def _number_of_rows(draw: Drawing) -> str:
    """Add the size of an axis as a number."""
    size = draw.node(
        "Gather", draw.node("Shape", draw.any()), draw.constant(draw.choice(0, 0, 1, -1), np.int64)
    )
    return draw.node(draw.choice("Mul", "Add"), draw.any(), draw.node("Cast", size, to=FLOAT))


def _positions(draw: Drawing) -> str:
    """Add a range over an axis, as in position embeddings."""
    size = draw.node("Gather", draw.node("Shape", draw.any()), draw.constant(draw.choice(0, 1, 1), np.int64))
    numbers = draw.node("Range", draw.constant(0, np.int64), size, draw.constant(1, np.int64))
    return draw.node("Add", draw.any(), draw.node("Cast", numbers, to=FLOAT))


def _norm(draw: Drawing) -> str:
    name = draw.any()
    shape = draw.shapes[name]
    channels = shape[1] if len(shape) > 1 else 1
    ones, zeros = draw.constant(np.ones(channels)), draw.constant(np.zeros(channels))
    if draw.chance(0.5):
        return draw.node("BatchNormalization", name, ones, zeros, zeros, ones)
    axis = draw.axis(name)
    return draw.node("LayerNormalization", name, draw.constant(np.ones(shape[axis:])), axis=axis)


def _image(draw: Drawing) -> str:
    name = draw.any()
    shape = draw.shapes[name]
    spatial = [1] * (len(shape) - 2)
    way = draw.random.randrange(3)
    if way == 0:
        return draw.node("Conv", name, draw.weights(2, shape[1], *spatial))
    if way == 1:
        return draw.node("GlobalAveragePool", name)
    return draw.node("MaxPool", name, kernel_shape=spatial)


def _recurrent(draw: Drawing) -> str:
    name = draw.any()
    width, layout = draw.shapes[name][-1], draw.random.randrange(2)
    w, r = draw.weights(1, 6, width), draw.weights(1, 6, 2)
    return draw.node("GRU", name, w, r, hidden_size=2, layout=layout)


def _eye(draw: Drawing) -> str:
    name = draw.any()
    return draw.node("Mul", name, draw.node("EyeLike", name))


def _filled(draw: Drawing) -> str:
    value = numpy_helper.from_array(np.array([2.0], np.float32))
    return draw.node("ConstantOfShape", draw.node("Shape", draw.any()), value=value)


def _loop_over_axis_0(draw: Drawing) -> str:
    """Add a Loop over the first axis, which passes a sum or a maximum on to the next iteration."""
    name = draw.any()
    passing = draw.choice("Add", "Max")
    count = draw.node("Gather", draw.node("Shape", name), draw.constant(0, np.int64))
    none = draw.constant(np.zeros([1] * (len(draw.shapes[name]) - 1)))
    t = f"t{len(draw.nodes)}"
    body = parser.parse_graph(
        f"""body (int64 {t}_i, bool {t}_on, float[] {t}_before) => (bool {t}_on_after, float[] {t}_after, float[] {t}_made) {{
            {t}_on_after = Identity ({t}_on) {t}_row = Gather <axis = 0> ({name}, {t}_i)
            {t}_after = {passing} ({t}_before, {t}_row) {t}_made = Add ({t}_row, {t}_before)
        }}"""
    )
    for info in (body.input[2], *body.output[1:]):
        # They have any shape.
        info.type.tensor_type.ClearField("shape")
    last = draw.node("Loop", count, draw.constant(True, np.bool_), none, body=body)
    draw.nodes[-1].output.append(f"{last}_all")
    return f"{last}_all"


def _element_of_sequence(draw: Drawing) -> str:
    """Add the first or last part of the first axis to all of it."""
    name = draw.any()
    parts = draw.node("SplitToSequence", name, axis=0)
    return draw.node("Add", name, draw.node("SequenceAt", parts, draw.constant(draw.choice(0, -1), np.int64)))


def _random_numbers(draw: Drawing) -> str:
    """Add random numbers, or those that a Dropout makes zero."""
    name = draw.any()
    kind = draw.choice("RandomNormalLike", "RandomUniformLike", "Bernoulli", "Dropout")
    if kind == "Dropout":
        training = draw.constant(draw.chance(0.5), np.bool_)
        return draw.node(kind, name, draw.constant(0.5), training)
    seed = {"seed": 1.0} if draw.chance(0.5) else {}
    given = draw.node("Sigmoid", name) if kind == "Bernoulli" else name
    return draw.node("Add", name, draw.node(kind, given, **seed))


MAKERS: Sequence[Maker] = (
    lambda draw: draw.one_of("Relu Tanh Abs Neg Sigmoid Identity Floor", draw.any),
    lambda draw: draw.one_of("Add Mul Sub Max Min", draw.any, draw.any),
    *(_with_constant, _softmax, _reduce, _arg, _transpose, _transpose, _reshape, _reshape),
    *(_reshape_by_shape, _reshape_by_shape, _squeeze),
    lambda draw: draw.node("Flatten", name := draw.any(), axis=draw.axis(name)),
    *(_concat, _slice, _gather, _gather_by_values, _scatter, _matmul, _matmul, _gemm, _einsum, _pad, _tile),
    lambda draw: draw.node("Expand", draw.any(), draw.node("Shape", draw.any())),
    *(_cumsum, _of_two("TopK", (1,)), _number_of_rows, _positions),
    lambda draw: draw.node(
        "Where", draw.node("Greater", draw.any(), draw.constant(0.0)), draw.any(), draw.any()
    ),
    *(_norm, _image, _recurrent, _eye),
    lambda draw: draw.node("Trilu", draw.any()),
    *(_of_two("Split"), _filled, _loop_over_axis_0, _element_of_sequence, _random_numbers),
)


def composed(seed: int) -> Model | None:
    """Return the graph of this seed; None if its output has another number of rows than the input."""
    draw = Drawing(seed)
    x = np.random.default_rng(seed).standard_normal((ROWS, *draw.row)).astype(np.float32)
    output = "x"
    for _ in range(draw.random.randrange(2, _MOST_NODES)):
        nodes, constants = len(draw.nodes), len(draw.constants)
        try:
            output = draw.random.choice(MAKERS)(draw)
            shape = np.asarray(session_of(draw.model(output)).run(None, {"x": x})[0]).shape
        except Exception:
            # The operator does not fit the shapes; draw another.
            shape = (0,)
        if 0 in shape or np.prod(shape) > _MOST_ELEMENTS or not shape:
            del draw.nodes[nodes:], draw.constants[constants:]
            continue
        draw.shapes[output] = shape
    output = list(draw.shapes)[-1]
    if output == "x" or draw.shapes[output][0] != ROWS:
        return None
    rows = np.concatenate([x, x[::-1] * 3 + 1])
    return Model(f"composed {seed}", draw.model(output), {"x": rows})


def compare_all(first: int, count: int, keep: Path | None = None) -> list[Compared]:
    """Compare the analysis with runs of `count` graphs; write those proved in error to `keep`."""
    compared = []
    for seed in range(first, first + count):
        model = composed(seed)
        if model is None:
            continue
        one = compare(model)
        compared.append(one)
        if one.mixing and not one.analysis.reasons and keep is not None:
            (keep / f"{seed}.onnx").write_bytes(model.model.SerializeToString())
    return compared


def main() -> int:
    """Return 0 if nothing that mixes rows is proved, and 90 % of the graphs that do not mix are."""
    parser = argparse.ArgumentParser(prog="conformance.drawn.compositions")
    parser.add_argument("--count", type=int, default=1000, help="graphs that are drawn")
    parser.add_argument("--seed", type=int, default=1, help="number of the first")
    arguments = parser.parse_args()
    keep = Path(tempfile.mkdtemp(prefix="compositions-"))
    good = report(compare_all(arguments.seed, arguments.count, keep))
    print(f"graphs proved in error, if any, are in {keep}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
