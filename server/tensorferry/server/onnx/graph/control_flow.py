"""The operators If, Loop, Scan and SequenceMap, which contain graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import onnx

from tensorferry.server.onnx.graph.bodies import (
    Inputs,
    OverRows,
    Repetition,
    Scope,
    attempted,
    given,
    merged,
    number_of,
    outputs_of,
    over_rows,
    repeated_outputs_of,
    unnumbered,
)
from tensorferry.server.onnx.graph.model_file import graphs_in
from tensorferry.server.onnx.graph.operators import NOT_ANALYSED, axis_of
from tensorferry.server.onnx.graph.row_axis import rearranged
from tensorferry.server.onnx.graph.sizes import Size, unknown
from tensorferry.server.onnx.graph.values import MixesRows, UnknownEffect, Value

if TYPE_CHECKING:
    from tensorferry.server.onnx.graph.graph_walk import GraphWalk

# Makes the names of unknown sizes and of loops unique.
_count = itertools.count()


def conditional(
    walk: GraphWalk, node: onnx.NodeProto, label: str, inputs: Inputs, scope: Scope, doubts: list[str]
) -> list[Value]:
    """Run one of two graphs; the same one for all rows."""
    condition = given(inputs[0])
    attributes = walk.attributes(node)
    branches = [attributes["then_branch"], attributes["else_branch"]]
    known = number_of(condition)
    if known is None:
        known = walk.decision(condition)
    if known is not None:
        return outputs_of(walk, branches[0 if known else 1], scope, {})
    _check_shared(condition, label, "chooses one branch for all rows", doubts)
    if condition.value_dependent:
        walk.value_dependent_nodes.append(f"{label} chooses a branch by values")
    then, other = (outputs_of(walk, branch, scope, {}) for branch in branches)
    name = f"?if{next(_count)}"
    return [
        _decided_by(condition, attempted(label, partial(merged, f"{name}.{at}", *pair), pair))
        for at, pair in enumerate(zip(then, other, strict=True))
    ]


def loop(
    walk: GraphWalk, node: onnx.NodeProto, label: str, inputs: Inputs, scope: Scope, doubts: list[str]
) -> list[Value]:
    """Run a graph repeatedly; tensors pass from one iteration to the next."""
    deciding = [value for value in inputs[:2] if value is not None]
    for value in deciding:
        _check_shared(value, label, "repeats its body equally often for all rows", doubts)
    body: onnx.GraphProto = walk.attributes(node)["body"]
    repetition = Repetition(walk, body, scope, label, f"?loop{next(_count)}")
    run = partial(repetition.run, inputs[2:], first=[Value(()), Value(())], skipped=1)
    over = max(map(over_rows, deciding), default=OverRows.NO)
    state, (continues, *collected) = run(over)
    if over_rows(continues) > over:
        state, (continues, *collected) = run(over_rows(continues))
    how = "ends its body's repetition for all rows together"
    if repetition.name in continues.picked:
        raise MixesRows(how)
    if continues.problems is not None:
        if continues.problems.mixes:
            return [replace(continues, value_dependent=True)] * len(node.output)
        doubts.extend(continues.problems.unknown)
    elif number_of(continues) is None:
        _check_shared(continues, label, how, doubts)
        deciding.append(continues)
    if any(value.value_dependent for value in deciding):
        walk.value_dependent_nodes.append(f"{label} has a number of iterations that depends on values")
    times = unknown(f"{repetition.name}.times")
    made = [*state, *(attempted(label, partial(_stacked, value, 0, times), (value,)) for value in collected)]
    for value in deciding:
        made = [_decided_by(value, one) for one in made]
    return made


def scan(
    walk: GraphWalk, node: onnx.NodeProto, label: str, inputs: Inputs, scope: Scope, doubts: list[str]
) -> list[Value]:
    """Run a graph for each element along an axis of some inputs."""
    attributes = walk.attributes(node)
    body: onnx.GraphProto = attributes["body"]
    if len(inputs) != len(body.input) or any(value is None for value in inputs):
        raise UnknownEffect("is of an old version")
    count = int(attributes["num_scan_inputs"])
    repetition = Repetition(walk, body, scope, label, f"?scan{next(_count)}")
    axes = attributes.get("scan_input_axes") or [0] * count
    length: Size = 1
    elements = []
    for value, axis in zip(map(given, inputs[len(inputs) - count :]), axes, strict=True):
        element, length = _element(value, axis, repetition.name)
        elements.append(element)
    numbered = any(repetition.name in element.iterations for element in elements)
    if numbered:
        doubts.append(f"{label} runs along the indices of rows in the batch")
    over = OverRows.YES if numbered else OverRows.NO
    state, collected = repetition.run(inputs[: len(inputs) - count], over, last=elements)
    axes = attributes.get("scan_output_axes") or [0] * len(collected)
    stacked = [
        attempted(label, partial(_stacked, value, axis, length), (value,))
        for value, axis in zip(collected, axes, strict=True)
    ]
    return [*state, *stacked]


def sequence_map(
    walk: GraphWalk, node: onnx.NodeProto, label: str, inputs: Inputs, scope: Scope, doubts: list[str]
) -> list[Value]:
    """Run a graph for each element of a sequence. Only nodes that mix rows are found."""
    walk.value_dependent_nodes.append(f"{label} is an operator with unknown run time")
    doubts.append(f"{label} {NOT_ANALYSED}")
    body: onnx.GraphProto = walk.attributes(node)["body"]
    own = frozenset({f"?map{next(_count)}"})
    elements = [Value(value.shape, picked=own) if value.row_parts else value for value in map(given, inputs)]
    names = [one.name for one in body.input]
    made = repeated_outputs_of(walk, body, scope, dict(zip(names, elements, strict=False)))
    return [Value(problems=value.problems, value_dependent=True) for value in made]


# By operator. Each adds to its last argument what makes all outputs unknown, and looks into the graphs nevertheless.
OPERATORS: Mapping[str, Callable[[GraphWalk, onnx.NodeProto, str, Inputs, Scope, list[str]], list[Value]]] = {
    "If": conditional,
    "Loop": loop,
    "Scan": scan,
    "SequenceMap": sequence_map,
}


def captured_names(node: onnx.NodeProto) -> set[str]:
    """Return the names of outer tensors that the node's graphs may use."""
    names = set()
    for graph in graphs_in(node):
        for inner in graph.node:
            names |= {*inner.input, *captured_names(inner)}
        names |= {output.name for output in graph.output}
    return names


def _check_shared(value: Value, label: str, how: str, doubts: list[str]) -> None:
    """Raise if a value that decides for all rows together depends on rows; add a doubt if it does on their number."""
    if value.rows is not None:
        raise MixesRows(how)
    if over_rows(value) is OverRows.YES:
        doubts.append(f"{label} {how}, depending on the number of rows in the batch")


def _decided_by(deciding: Value, value: Value) -> Value:
    """Return a value that also depends on what decided how it is computed."""
    return replace(
        value,
        value_dependent=value.value_dependent or deciding.value_dependent,
        iterations=value.iterations | deciding.iterations,
        picked=value.picked | deciding.picked,
    )


def _element(value: Value, axis: int, name: str) -> tuple[Value, Size]:
    """Return the body's input for a tensor scanned along the axis, and the number of iterations."""
    if value.problems is not None:
        return value, unknown(f"{name}.length")
    sizes = value.sizes
    axis = axis_of(axis, len(sizes))
    if value.rows is not None and value.rows.axis == axis:
        if not value.row_indices:
            raise MixesRows("runs along the batch axis")
        return Value((*sizes[:axis], *sizes[axis + 1 :]), iterations=frozenset({name})), sizes[axis]
    new = rearranged(value, [at for at in range(len(sizes)) if at != axis])
    return _like(unnumbered(value), new), sizes[axis]


def _stacked(value: Value, axis: int, length: Size) -> Value:
    """Return the tensors of all iterations stacked on a new axis."""
    if value.problems is not None:
        return value
    if value.shape is None:
        return _like(value, Value())
    rank = len(unnumbered(value).sizes)
    axis = axis_of(axis, rank + 1)
    return _like(value, rearranged(value, [*range(axis), None, *range(axis, rank)], length))


def _like(value: Value, new: Value) -> Value:
    """Return a tensor of other sizes that depends on the same as `value`."""
    return replace(
        new,
        depends_on_row_count=value.depends_on_row_count,
        value_dependent=value.value_dependent,
        iterations=value.iterations,
        picked=value.picked,
    )
