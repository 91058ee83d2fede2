"""A walk over a graph that finds which changes keep the rows of a batch apart."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
from onnx import helper

from tensorferry.server.onnx.graph.bodies import Scope
from tensorferry.server.onnx.graph.graph_walk import GraphWalk
from tensorferry.server.onnx.graph.rewriting.changes import (
    GatherInBatch,
    GatherInRows,
    NewSizes,
    NewTarget,
    NodeChange,
    RepeatedInput,
)
from tensorferry.server.onnx.graph.sizes import NUMBER_OF_ROWS, Product, fixed, product
from tensorferry.server.onnx.graph.values import RowAxis, Value, of_content, vector_of

# The first versions of the operator set in which Slice takes its ends as inputs, with Expand, and in which GatherND has
# axes of the batch.
_SLICE_WITH_INPUTS, _EXPAND, _BATCH_DIMS = 10, 8, 12
# The batch axes of inputs that an operator does not broadcast, by their numbers.
_BATCH_AXES: Mapping[str, Mapping[int, int]] = {
    "GRU": {5: 1},
    "GatherElements": {0: 0, 1: 0},
    "GridSample": {1: 0},
    "LSTM": {5: 1, 6: 1},
    "RNN": {5: 1},
}


class ChangingWalk(GraphWalk):
    """A walk that collects changes of nodes of the main graph, as `FreedRows` has them.

    With `fixes`, it changes nodes that do not keep the rows apart, and goes on with what they then make:

    - A Reshape of rows on axis 0 whose target begins with 1 gets the number of rows there. In another constant target, the
      rows multiply one size: 4 heads of one row become 4 * rows.
    - A Resize to constant sizes gets the number of rows among them. An Expand to constant sizes keeps that of the rows' axis.
    - A Gather from merged rows, at indices that are the same for all, gathers from each row. A GatherND, whose indices on the
      batch axis can only be those of the one row, has rows of indices in their place.
    - An input that is the same for all rows is repeated for each, if the operator does not broadcast it.

    Without `fixes`, it only makes constants of computed targets of Reshape in which one size counts rows: ONNX Runtime would
    compute them in each run, and in the file they are constant.
    """

    def __init__(self, model: onnx.ModelProto, decisions: Sequence[bool] = (), *, fixes: bool) -> None:
        super().__init__(model, decisions)
        self.changes: list[NodeChange] = []
        self._fixes = fixes
        self._opset = max((one.version for one in model.opset_import if not one.domain), default=1)
        # Nodes of functions and of graphs in nodes are not changed.
        self._own = {node.output[0] for node in model.graph.node if node.output}

    def _node(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value]:
        if self._depth or node.domain or not node.output or node.output[0] not in self._own:
            return super()._node(node, scope)
        target = self._target(node, scope) if node.op_type == "Reshape" else None
        if target is not None:
            return [self._reshaped(node, scope, target)]
        made = super()._node(node, scope)
        if self._fixes and made[0].problems and self._opset >= _EXPAND:
            changes = {
                "Expand": self._expanded,
                "Gather": self._gathered,
                "GatherND": self._gathered_nd,
                "Resize": self._resized,
            }
            return changes.get(node.op_type, self._with_repeated_inputs)(node, scope) or made
        return made

    def _target(self, node: onnx.NodeProto, scope: Scope) -> list[Any] | None:
        """Return the target of a Reshape; None if it is unknown, or 0 may be the size of an axis in it."""
        target = scope.get(node.input[1]) if len(node.input) > 1 else None
        if target is None or target.content is None:
            return None
        sizes = list(target.content.flat)
        if self.attributes(node).get("allowzero", 0) and not all(
            isinstance(size, int) and size for size in sizes
        ):
            return None
        return sizes

    def _reshaped(self, node: onnx.NodeProto, scope: Scope, target: list[Any]) -> Value:
        """Return what a Reshape makes, and collect its new target if it has one."""
        value = scope.get(node.input[0])
        on_axis_0 = value is not None and value.rows == RowAxis(0)
        computed = any(isinstance(size, Product) for size in target)
        leads = self._fixes and on_axis_0 and target[:1] == [1]
        leads = leads and (self._opset >= _SLICE_WITH_INPUTS or not computed)
        sizes = [0, *target[1:]] if leads else target
        made = self._with_sizes(node, scope, 1, sizes)
        if self._fixes and not computed and value is not None and value.rows and made.problems:
            apart = sorted(self._multiplied(node, scope, target), key=_unlikely)
            if apart:
                self.changes.append(NewTarget(node.output[0], _numbers(apart[0], keeps_axis_0=False)))
                return apart[0]
        numbers = _numbers(made, keeps_axis_0=on_axis_0) if computed else tuple(sizes)
        if leads or (computed and numbers):
            self.changes.append(NewTarget(node.output[0], numbers))
        return made

    def _multiplied(self, node: onnx.NodeProto, scope: Scope, target: list[Any]) -> Iterator[Value]:
        """Yield what a Reshape makes if the rows multiply a size of its target, for each that keeps them apart."""
        for axis, size in enumerate(target):
            if size > 0:
                sizes = [*target[:axis], product(size, NUMBER_OF_ROWS), *target[axis + 1 :]]
                made = self._with_sizes(node, scope, 1, sizes)
                if _numbers(made, keeps_axis_0=False):
                    yield made

    def _resized(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value] | None:
        """Return what a Resize makes with the number of rows among its sizes; None if that does not help."""
        value, sizes = (scope.get(node.input[at]) if at < len(node.input) else None for at in (0, 3))
        if value is None or value.rows is None or sizes is None or sizes.content is None:
            return None
        axis, numbers = value.rows.axis, list(sizes.content.flat)
        if (
            len(numbers) != value.rank
            or numbers[axis] != 1
            or len(fixed(numbers)) != len(numbers)
            or 0 in numbers
        ):
            return None
        made = self._with_sizes(node, scope, 3, [*numbers[:axis], NUMBER_OF_ROWS, *numbers[axis + 1 :]])
        return self._collected([made], NewSizes(node.output[0], (*numbers[:axis], 0, *numbers[axis + 1 :])))

    def _expanded(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value] | None:
        """Return what an Expand makes that keeps the size of the rows' axis; None if it does something else."""
        value, target = (scope.get(name) for name in node.input)
        if (
            value is None
            or value.rows is None
            or value.rank is None
            or target is None
            or target.content is None
        ):
            return None
        sizes = list(target.content.flat)
        # Axes are aligned from the last one.
        at = len(sizes) - value.rank + value.rows.axis
        if (
            at < 0
            or len(fixed(sizes)) != len(sizes)
            or sizes[at] != product(value.rows.outer, value.rows.inner)
        ):
            return None
        # An axis of size 1 in the target does not change the input's.
        sizes[at] = 1
        made = self._with_sizes(node, scope, 1, sizes)
        return self._collected([made], NewTarget(node.output[0], tuple(sizes)))

    def _gathered(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value] | None:
        """Return what a Gather from merged rows makes of each row; None if it does something else."""
        data, indices = (scope.get(name) for name in node.input)
        if data is None or data.rows is None or data.rows.axis or data.rows.outer != 1:
            return None
        if indices is None or not indices.is_free or not indices.shape or indices.shape[0] != 1:
            return None
        row = (data.rows.inner, *data.sizes[1:])
        numbers = tuple(fixed(row))
        if len(numbers) != len(row) or 0 in numbers or self.attributes(node).get("axis", 0):
            return None
        changed = helper.make_node("Gather", ["data", "indices"], node.output, node.name, axis=1)
        rows = replace(data, shape=(NUMBER_OF_ROWS, *row), rows=RowAxis(0))
        picked = Value(indices.shape[1:], value_dependent=indices.value_dependent)
        made = super()._node(changed, {"data": rows, "indices": picked})
        return self._collected(made, GatherInRows(node.output[0], numbers))

    def _gathered_nd(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value] | None:
        """Return what a GatherND makes of each row at the indices behind axis 0; None if it does something else."""
        data, indices = (scope.get(name) for name in node.input)
        if data is None or data.rows != RowAxis(0) or self._opset < _BATCH_DIMS:
            return None
        if indices is None or not indices.is_free or not indices.shape or indices.shape[0] != 1:
            return None
        width = indices.shape[-1]
        if not isinstance(width, int) or width < 2 or self.attributes(node).get("batch_dims", 0):
            return None
        behind = Value((NUMBER_OF_ROWS, *indices.shape[1:-1], width - 1), RowAxis(0))
        changed = helper.make_node("GatherND", ["data", "indices"], node.output, node.name, batch_dims=1)
        made = super()._node(changed, {"data": data, "indices": behind})
        repeated = RepeatedInput(node.output[0], 1, 0, len(indices.shape))
        return self._collected(made, GatherInBatch(node.output[0]), repeated)

    def _collected(self, made: Sequence[Value], *changes: NodeChange) -> Sequence[Value] | None:
        """Collect the changes with which a node makes this, and return it; None if it has problems."""
        if made[0].problems:
            return None
        self.changes += changes
        return made

    def _with_sizes(self, node: onnx.NodeProto, scope: Scope, number: int, sizes: Sequence[Any]) -> Value:
        """Return what a node makes if these are the numbers in an input. A 0 in the target of Reshape copies a size."""
        changed = onnx.NodeProto.FromString(node.SerializeToString())
        if node.op_type == "Reshape":
            del changed.attribute[:]
        content = of_content(vector_of(sizes))
        (made,) = super()._node(changed, ChainMap({node.input[number]: content}, dict(scope)))
        return made

    def _with_repeated_inputs(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value] | None:
        """Return what a node makes of inputs that are repeated for each row; None if that does not help."""
        changed = onnx.NodeProto.FromString(node.SerializeToString())
        inputs = [scope.get(name) if name else None for name in node.input]
        around, repeated = dict(scope), []
        for number, axis in self._batch_axes(node, inputs).items():
            value = inputs[number] if number < len(inputs) else None
            if value is None or not value.is_free or value.shape is None:
                continue
            size = value.shape[axis] if 0 <= axis < len(value.shape) else 0
            if not isinstance(size, int) or not size:
                continue
            sizes = (*value.shape[:axis], product(NUMBER_OF_ROWS, size), *value.shape[axis + 1 :])
            rows = RowAxis(axis, 1, size)
            changed.input[number] = f"{node.output[0]}:input{number}"
            around[changed.input[number]] = Value(sizes, rows, value_dependent=value.value_dependent)
            repeated.append(RepeatedInput(node.output[0], number, axis, len(sizes)))
        return self._collected(super()._node(changed, around), *repeated) if repeated else None

    def _batch_axes(self, node: onnx.NodeProto, inputs: Sequence[Value | None]) -> Mapping[int, int]:
        """Return the axes on which inputs of a node must have rows, by their numbers."""
        with_rows = next((value for value in inputs if value is not None and value.rows is not None), None)
        if with_rows is not None and with_rows.rows is not None and with_rows.rank is not None:
            if node.op_type == "Concat":
                return dict.fromkeys(range(len(inputs)), with_rows.rows.axis)
            if node.op_type == "MatMul":
                # Axes are aligned from the last one.
                behind = with_rows.rank - with_rows.rows.axis
                ranks = [0 if value is None or value.rank is None else value.rank for value in inputs]
                return {number: rank - behind for number, rank in enumerate(ranks)}
        return {} if self.attributes(node).get("layout", 0) else _BATCH_AXES.get(node.op_type, {})


def _unlikely(value: Value) -> tuple[bool, bool, bool]:
    """Return a key by which the likely place of the rows comes first.

    They have an axis alone, or are merged with heads, or with the steps in front of features.
    """
    rows = value.rows
    assert rows is not None
    return rows != RowAxis(rows.axis), rows.axis + 1 == value.rank, rows.outer != 1


def _numbers(made: Value, *, keeps_axis_0: bool) -> tuple[int, ...]:
    """Return a constant target for a reshaped tensor; empty if more than the number of rows is computed.

    0 copies the number of rows, and -1 stands for their number times other sizes.
    """
    if made.rows is None or made.shape is None:
        return ()
    rows = 0 if keeps_axis_0 and made.rows == RowAxis(0) else -1
    sizes = [rows if axis == made.rows.axis else size for axis, size in enumerate(made.shape)]
    numbers = fixed(sizes)
    # 0 would stand for a size of the input.
    return tuple(numbers) if len(numbers) == len(sizes) and numbers.count(0) == (rows == 0) else ()
