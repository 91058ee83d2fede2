"""The operators If, Loop and Scan, which contain graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import onnx

from tensorferry.server.onnx_graph.operators import USES_ROW_INDICES, MixesRows, UnknownEffect
from tensorferry.server.onnx_graph.row_axis import axis_of, on_axis, shape_of, with_rows
from tensorferry.server.onnx_graph.sizes import Product, Size, unknown
from tensorferry.server.onnx_graph.values import Value, merged_problems

if TYPE_CHECKING:
    from tensorferry.server.onnx_graph.graph_walk import GraphWalk

# Most passes over a loop's body to reach a fixed point.
_PASSES = 12
# Makes the names of unknown sizes unique.
_count = itertools.count()

_Inputs = Sequence[Value | None]


def conditional(
    walk: GraphWalk, node: onnx.NodeProto, label: str, inputs: _Inputs, scope: Mapping[str, Value | None]
) -> list[Value]:
    """Run one of two graphs; the same one for all rows."""
    condition = _given(inputs[0])
    attributes = walk.attributes(node)
    branches = [attributes["then_branch"], attributes["else_branch"]]
    known = _number(condition)
    if known is not None:
        return _outputs(walk, branches[0 if known else 1], scope, {})
    _check_shared(condition, "chooses one branch for all rows")
    if condition.value_dependent:
        walk.value_dependent_nodes.append(f"{label} chooses a branch by values")
    then, other = (_outputs(walk, branch, scope, {}) for branch in branches)
    name = f"?if{next(_count)}"
    merged = [_merged(f"{name}.{at}", *pair) for at, pair in enumerate(zip(then, other, strict=True))]
    return [
        replace(value, value_dependent=value.value_dependent or condition.value_dependent) for value in merged
    ]


def loop(
    walk: GraphWalk, node: onnx.NodeProto, label: str, inputs: _Inputs, scope: Mapping[str, Value | None]
) -> list[Value]:
    """Run a graph repeatedly; tensors pass from one iteration to the next."""
    body: onnx.GraphProto = walk.attributes(node)["body"]
    valued = False
    for value in inputs[:2]:
        if value is not None:
            _check_shared(value, "repeats its body equally often for all rows")
            valued = valued or value.value_dependent
    names = [one.name for one in body.input]
    name = f"?loop{next(_count)}"
    state = [_loop_state(value) for value in inputs[2:]]
    for _ in range(_PASSES):
        given = dict(zip(names, [Value(()), Value(()), *state], strict=False))
        outputs = _outputs(walk, body, scope, given)
        continues, carried, collected = outputs[0], outputs[1 : 1 + len(state)], outputs[1 + len(state) :]
        pairs = zip(state, carried, strict=True)
        new = [_merged(f"{name}.{at}", one, _loop_state(other)) for at, (one, other) in enumerate(pairs)]
        if new == state:
            break
        state = new
    else:
        raise UnknownEffect("passes on tensors whose shape changes in each iteration")
    if continues.problems is not None:
        return [replace(continues, value_dependent=True)] * len(node.output)
    if _number(continues) is None:
        _check_shared(continues, "ends its body's repetition for all rows together")
        valued = valued or continues.value_dependent
    if valued:
        walk.value_dependent_nodes.append(f"{label} has a number of iterations that depends on values")
    times = unknown(f"{name}.times")
    made = [*state, *(_stacked(value, 0, times) for value in collected)]
    return [replace(value, value_dependent=value.value_dependent or valued) for value in made]


def scan(
    walk: GraphWalk, node: onnx.NodeProto, label: str, inputs: _Inputs, scope: Mapping[str, Value | None]
) -> list[Value]:
    """Run a graph for each element along an axis of some inputs."""
    attributes = walk.attributes(node)
    body: onnx.GraphProto = attributes["body"]
    if len(inputs) != len(body.input) or any(value is None for value in inputs):
        raise UnknownEffect("is of an old version")
    count = int(attributes["num_scan_inputs"])
    state = [_loop_state(value) for value in inputs[: len(inputs) - count]]
    axes = attributes.get("scan_input_axes") or [0] * count
    length: Size = 1
    elements = []
    for value, given_axis in zip(inputs[len(state) :], axes, strict=True):
        element, length = _element(_given(value), given_axis)
        elements.append(element)
    names = [one.name for one in body.input]
    name = f"?scan{next(_count)}"
    for _ in range(_PASSES):
        outputs = _outputs(walk, body, scope, dict(zip(names, [*state, *elements], strict=True)))
        pairs = zip(state, outputs[: len(state)], strict=True)
        new = [_merged(f"{name}.{at}", one, _loop_state(other)) for at, (one, other) in enumerate(pairs)]
        if new == state:
            break
        state = new
    else:
        raise UnknownEffect("passes on tensors whose shape changes in each iteration")
    collected = outputs[len(state) :]
    axes = attributes.get("scan_output_axes") or [0] * len(collected)
    return [*state, *(_stacked(value, axis, length) for value, axis in zip(collected, axes, strict=True))]


OPERATORS: Mapping[
    str, Callable[[GraphWalk, onnx.NodeProto, str, _Inputs, Mapping[str, Value | None]], list[Value]]
] = {"If": conditional, "Loop": loop, "Scan": scan}


def _outputs(
    walk: GraphWalk, graph: onnx.GraphProto, scope: Mapping[str, Value | None], inputs: Mapping[str, Value]
) -> list[Value]:
    within = walk.tensors_of(graph, scope, inputs)
    return [_given(within[output.name]) for output in graph.output]


def captured_names(node: onnx.NodeProto) -> set[str]:
    """Return the names of outer tensors that the node's graphs may use."""
    names = set()
    for attribute in node.attribute:
        for inner in attribute.g.node:
            names |= {*inner.input, *captured_names(inner)}
        names |= {output.name for output in attribute.g.output}
    return names


def _given(value: Value | None) -> Value:
    if value is None:
        raise UnknownEffect("lacks an input or output")
    return value


def _number(value: Value) -> int | None:
    """Return the only element of a tensor as an integer; None if it is unknown."""
    if value.content is None or value.content.size != 1:
        return None
    number = value.content.reshape(-1)[0]
    return None if isinstance(number, Product) else int(number)


def _check_shared(value: Value, how: str) -> None:
    """Raise if a value that decides for all rows together depends on rows or on their number."""
    if value.rows is not None:
        raise MixesRows(how)
    if value.problems is None and value.depends_on_row_count and _number(value) is None:
        raise UnknownEffect(f"{how}, depending on the number of rows in the batch")


def _loop_state(value: Value | None) -> Value:
    """Return a tensor without its constant content, which changes in each iteration."""
    return Value() if value is None else replace(_unnumbered(value), content=None)


def _unnumbered(value: Value) -> Value:
    if value.row_indices:
        raise UnknownEffect(USES_ROW_INDICES)
    return value


def _merged(name: str, one: Value, other: Value) -> Value:
    """Return what is known of a tensor that is one of two. Sizes that differ become unknown sizes named by `name`."""
    valued = one.value_dependent or other.value_dependent
    if one.problems is not None or other.problems is not None:
        return Value(problems=merged_problems((one.problems, other.problems)), value_dependent=True)
    if _unnumbered(one).rows != _unnumbered(other).rows:
        raise UnknownEffect("produces a tensor whose row axis depends on the branch")
    depends_on_row_count = one.depends_on_row_count or other.depends_on_row_count
    same = one.content is not None and other.content is not None and one.content.shape == other.content.shape
    if same and all(a == b for a, b in zip(one.content.flat, other.content.flat, strict=True)):  # type: ignore[union-attr]
        return replace(one, value_dependent=valued)
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        if one.rows is not None or depends_on_row_count:
            raise UnknownEffect("produces a tensor whose rank depends on the branch")
        return Value(value_dependent=valued)
    sizes = tuple(
        a if a == b else unknown(f"{name}.{axis}", a, b)
        for axis, (a, b) in enumerate(zip(one.shape, other.shape, strict=True))
    )
    return Value(sizes, one.rows, depends_on_row_count=depends_on_row_count, value_dependent=valued)


def _element(value: Value, axis: int) -> tuple[Value, Size]:
    """Return the body's input for a tensor scanned along the axis, and the number of iterations."""
    sizes = shape_of(_unnumbered(value))
    axis = axis_of(axis, len(sizes))
    rows = value.rows
    if rows is not None and rows.axis == axis:
        raise MixesRows("runs along the batch axis")
    left = (*sizes[:axis], *sizes[axis + 1 :])
    new = with_rows(left, on_axis(rows, rows.axis - (rows.axis > axis)) if rows is not None else None)
    return replace(
        new, depends_on_row_count=value.depends_on_row_count, value_dependent=value.value_dependent
    ), sizes[axis]


def _stacked(value: Value, axis: int, length: Size) -> Value:
    """Return the tensors of all iterations stacked on a new axis."""
    if value.problems is not None:
        return value
    if value.shape is None:
        return Value(value_dependent=value.value_dependent)
    sizes = shape_of(_unnumbered(value))
    axis = axis_of(axis, len(sizes) + 1)
    rows = value.rows
    new = with_rows(
        (*sizes[:axis], length, *sizes[axis:]),
        on_axis(rows, rows.axis + (rows.axis >= axis)) if rows is not None else None,
    )
    return replace(
        new, depends_on_row_count=value.depends_on_row_count, value_dependent=value.value_dependent
    )
