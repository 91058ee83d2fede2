"""Tensors whose batch axis is not their first, such as states [layers, batch, hidden]: a copy in which it is the first.

Transposes at the inputs and outputs of the copy keep the graph inside as it is. The analysis chooses the axes.

A variable axis behind the first of an only input may be a length, and requests may be long, so it counts no rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx

from tensorferry.server.onnx.graph.analysis import RowMixing, analysis_of, cases
from tensorferry.server.onnx.graph.rewriting.changes import (
    FreedRows,
    MovedAxis,
    NotFreed,
    callers_inputs,
    changed,
    read_changeable,
)
from tensorferry.server.onnx.graph.rewriting.changing_walk import ChangingWalk

# Most combinations of axes that are tried; four inputs with two axes each have 16.
_MOST_COMBINATIONS = 16


def batch_first(path: Path, has_time: Callable[[], bool]) -> FreedRows:
    """Return changes with which the rows are on the first axis of each input and output, and are proved independent.

    The batch axes of the inputs are 1 in the file, or have one name. If they have no names, one of them is a first axis. An
    only input whose axes are variable has its rows on the first. Combinations are tried while `has_time`. Raises NotFreed
    if none is proved, or if no axis would be moved.
    """
    read = read_changeable(path)
    inputs = [value for value in callers_inputs(read) if _possible(value)]
    if not inputs:
        raise NotFreed
    names = tuple(value.name for value in inputs)
    combinations = filter(partial(_is_batch, inputs), itertools.product(*map(_possible, inputs)))
    reasons: list[str] = []
    for axes in itertools.islice(combinations, _MOST_COMBINATIONS):
        if not has_time():
            break
        moved = tuple(
            MovedAxis(value.name, axis, len(value.type.tensor_type.shape.dim))
            for value, axis in zip(inputs, axes, strict=True)
            if axis
        )
        for fixes in (False, True):
            try:
                freed = _with_outputs(read, FreedRows(names, axes=moved), fixes=fixes)
                analysis = analysis_of(changed(read, freed), freed.inputs)
            except NotFreed as error:
                reasons += error.reasons
                continue
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


def _is_batch(inputs: Sequence[onnx.ValueInfoProto], axes: Sequence[int]) -> bool:
    """Return whether these axes of the inputs may be the batch axis."""
    dims = [value.type.tensor_type.shape.dim[axis] for value, axis in zip(inputs, axes, strict=True)]
    if all(dim.dim_value == 1 for dim in dims):
        return True
    if len(inputs) == 1:
        return tuple(axes) == (0,)
    names = {dim.dim_param for dim in dims}
    return len(names) == 1 and ("" not in names or 0 in axes)


def _with_outputs(read: onnx.ModelProto, freed: FreedRows, *, fixes: bool) -> FreedRows:
    """Add the outputs whose rows the walk finds behind axis 0, and the changes of nodes."""
    model = changed(read, freed)
    found: dict[str, MovedAxis] = {}
    walks = cases(model, freed.inputs, partial(ChangingWalk, model, fixes=fixes))
    # A node may be changed otherwise in each case, and the copy has one for all.
    first, others = walks[0][0], [walk for walk, _ in walks[1:]]
    nodes = tuple(each for each in first.changes if all(each in walk.changes for walk in others))
    for _, tensors in walks:
        for output in model.graph.output:
            value = tensors.get(output.name)
            if value is not None and value.rows is not None and value.rows.axis and value.rank is not None:
                moved = MovedAxis(output.name, value.rows.axis, value.rank)
                if found.setdefault(output.name, moved) != moved:
                    raise NotFreed(f"output {output.name} has another rank or batch axis for other lengths")
    return replace(freed, nodes=nodes, axes=(*freed.axes, *found.values()))
