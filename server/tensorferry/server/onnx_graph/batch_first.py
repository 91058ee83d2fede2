"""Tensors whose batch axis is not their first, such as states [layers, batch, hidden]: a copy in which it is the first.

Transposes at the inputs and outputs of the copy keep the graph inside as it is. The analysis chooses the axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx

from tensorferry.server.onnx_graph.analysis import RowMixing, analysis_of, inputs_of
from tensorferry.server.onnx_graph.free_rows import (
    FreedRows,
    MovedAxis,
    NotFreed,
    ReshapeWalk,
    callers_inputs,
    changed,
    read_changeable,
)
from tensorferry.server.onnx_graph.values import Value

# Most combinations of axes that are tried; a graph of two inputs with four axes has 16.
_MOST_COMBINATIONS = 16


def batch_first(path: Path) -> FreedRows:
    """Return changes with which the rows are on the first axis of each input and output, and are proved independent.

    The batch axis of an input is one that is 1 or variable. Raises NotFreed if no combination is proved, or if no axis
    would be moved.
    """
    read = read_changeable(path)
    inputs = [value for value in callers_inputs(read) if _possible(value)]
    if not inputs:
        raise NotFreed("no input has an axis of 1 or a variable one")
    names = tuple(value.name for value in inputs)
    combinations = itertools.product(*map(_possible, inputs))
    reasons: list[str] = []
    for axes in itertools.islice(combinations, _MOST_COMBINATIONS):
        moved = tuple(
            MovedAxis(value.name, axis, len(value.type.tensor_type.shape.dim))
            for value, axis in zip(inputs, axes, strict=True)
            if axis
        )
        for fixes in (False, True):
            try:
                freed = _with_outputs(read, FreedRows(names, axes=moved), fixes=fixes)
                analysis = analysis_of(changed(read, freed), freed.inputs)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            if analysis.finding is RowMixing.SEPARATE and freed.axes:
                return freed
            reasons += analysis.reasons
    raise NotFreed(*dict.fromkeys(reasons))


def _possible(value: onnx.ValueInfoProto) -> list[int]:
    dims = value.type.tensor_type.shape.dim
    return [axis for axis, dim in enumerate(dims) if dim.dim_value == 1 or not dim.HasField("dim_value")]


def _with_outputs(read: onnx.ModelProto, freed: FreedRows, *, fixes: bool) -> FreedRows:
    """Add the outputs whose rows the walk finds behind axis 0, and the new targets of Reshape."""
    model = changed(read, freed)
    walk = ReshapeWalk(model, fixes=fixes)
    tensors: Mapping[str, Value | None] = walk.tensors_of(model.graph, {}, inputs_of(model, freed.inputs))
    found = []
    for output in model.graph.output:
        value = tensors.get(output.name)
        if value is not None and value.rows is not None and value.rows.axis and value.rank is not None:
            found.append(MovedAxis(output.name, value.rows.axis, value.rank))
    return replace(freed, reshapes=tuple(walk.found), axes=(*freed.axes, *found))
