"""A first axis fixed to 1: changes of a graph that make it variable, with the same answers for one row.

The changes only replace a 1 by a size that is 1 if there is one row. So the changed graph computes the same for one row as
the file does. For more rows, the analysis must prove that they are independent.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tensorferry.server.onnx.graph.analysis import RowMixing, analysis_of
from tensorferry.server.onnx.graph.bodies import Scope
from tensorferry.server.onnx.graph.control_flow import captured_names
from tensorferry.server.onnx.graph.graph_walk import GraphWalk
from tensorferry.server.onnx.graph.model_file import (
    UnreadableModel,
    external_files,
    graphs_in,
    read_model,
)
from tensorferry.server.onnx.graph.sizes import Product, fixed
from tensorferry.server.onnx.graph.values import RowAxis, Value, of_content, vector_of

# The limit of a protobuf message, with a reserve for what is added.
_MOST_BYTES = 2**31 - 2**20
# The first version of the operator set in which Slice takes its ends as inputs.
_SLICE_WITH_INPUTS = 10


class NotFreed(Exception):
    """The graph cannot be changed so that the analysis proves its rows independent. `reasons` say why."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class MovedAxis:
    """An input or output, its batch axis, and its number of axes, which the file may declare wrongly for an output."""

    name: str
    axis: int
    rank: int


@dataclass(frozen=True, slots=True)
class FreedRows:
    """Changes of a graph. `inputs` have a first axis of 1 that becomes variable, and so have all such outputs.

    `reshapes` are nodes by the name of their output, with their new targets. A target is empty if only its leading 1 becomes
    0, which copies the size of the input's first axis, and its other sizes are computed. `axes` has inputs and outputs
    whose batch axis is another one, which the changes move to the front.
    """

    inputs: tuple[str, ...]
    reshapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    axes: tuple[MovedAxis, ...] = ()


def free_rows(path: Path) -> FreedRows:
    """Return the changes of a file with which its rows are proved independent; raise NotFreed if there are none.

    Constant targets of Reshape are changed only if the graph is not proved without.
    """
    read = read_changeable(path)
    inputs = tuple(value.name for value in callers_inputs(read) if _is_one(value))
    if not inputs:
        raise NotFreed("no input has a first axis of 1")
    try:
        model = changed(read, FreedRows(inputs))
        for fixes in (False, True):
            walk = ReshapeWalk(model, fixes=fixes)
            analysis = analysis_of(model, inputs, walk)
            if analysis.finding is RowMixing.SEPARATE:
                return FreedRows(inputs, tuple(walk.found))
    except Exception as error:
        raise NotFreed(f"the graph could not be analysed ({type(error).__name__}: {error})") from error
    raise NotFreed(*analysis.reasons)


def read_changeable(path: Path) -> onnx.ModelProto:
    """Return a file's model as `read_model` does; raise NotFreed if it cannot be read, or not written with changes."""
    if path.is_file() and path.stat().st_size > _MOST_BYTES:
        raise NotFreed("the file is larger than 2 GB")
    try:
        return read_model(path)
    except UnreadableModel as error:
        raise NotFreed(f"the file {error}") from error


def changed(model: onnx.ModelProto, freed: FreedRows) -> onnx.ModelProto:
    """Return a changed copy of a model."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _apply(copy, freed)
    return copy


def write_freed(source: Path, freed: FreedRows, path: Path) -> None:
    """Write the changed model to a file, as `write_changed` does."""
    write_changed(source, partial(_apply, freed=freed), path)


def write_changed(source: Path, change: Callable[[onnx.ModelProto], None], path: Path) -> None:
    """Write a model to a file with a change. Its weights in other files are linked or copied beside it.

    Raises NotFreed if a weights file is outside the model's folder, or another file has its place, and OSError if it cannot be
    written.
    """
    for name in external_files(source):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise NotFreed(f"its weights file {name!r} is outside the model's folder")
        target = path.parent / name
        # ONNX Runtime refuses symbolic links that leave the folder.
        weights = os.path.realpath(source.parent / name)
        if target == path:
            raise NotFreed(f"{path} is the name of its weights file")
        if target.exists():
            # Of an earlier copy, or of another model, whose own file it may be by a link.
            if not (os.path.samefile(weights, target) or filecmp.cmp(weights, target, shallow=False)):
                raise NotFreed(f"its weights would replace {target}, which is another file")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(weights, target)
        except OSError:
            shutil.copyfile(weights, target)
    model = onnx.load(str(source), load_external_data=False)
    change(model)
    onnx.save(model, str(path))


def callers_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that are no weights."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constants]


def _is_one(value: onnx.ValueInfoProto) -> bool:
    dims = value.type.tensor_type.shape.dim
    return len(dims) > 0 and dims[0].dim_value == 1


def _apply(model: onnx.ModelProto, freed: FreedRows) -> None:
    """Change a model in place."""
    graph = model.graph
    axis = _unused_axis(graph)
    tensors = {value.name: value for value in (*graph.input, *graph.output)}
    for moved in freed.axes:
        _move(graph, tensors[moved.name], moved, is_input=moved.name in freed.inputs)
    for value in (*(value for value in graph.input if value.name in freed.inputs), *graph.output):
        if _is_one(value):
            value.type.tensor_type.shape.dim[0].dim_param = axis
    _forget_shapes(graph, nested=False)
    for function in model.functions:
        function.ClearField("value_info")
    targets = dict(freed.reshapes)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "Reshape" and node.output[0] in targets:
            nodes += _retarget(graph, node, targets[node.output[0]])
        nodes.append(node)
    if targets:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in _used(graph, nodes)]
        del graph.node[:]
        graph.node.extend(copies)


def _move(graph: onnx.GraphProto, value: onnx.ValueInfoProto, moved: MovedAxis, *, is_input: bool) -> None:
    """Move an axis of an input or output to the front, by a Transpose between it and the graph inside."""
    axis, rank = moved.axis, moved.rank
    dims = value.type.tensor_type.shape.dim
    sizes = [onnx.TensorShapeProto.Dimension.FromString(dim.SerializeToString()) for dim in dims]
    if len(sizes) != rank:
        sizes = [onnx.TensorShapeProto.Dimension() for _ in range(rank)]
    del dims[:]
    first = [axis, *(at for at in range(rank) if at != axis)]
    dims.extend(sizes[at] for at in first)
    inner = f"{value.name}:inner"
    _rename(graph.node, value.name, inner)
    if is_input:
        back = np.argsort(first).tolist()
        graph.node.insert(0, helper.make_node("Transpose", [value.name], [inner], perm=back, name=inner))
    else:
        graph.node.append(helper.make_node("Transpose", [inner], [value.name], perm=first, name=inner))


def _rename(nodes: Iterable[onnx.NodeProto], old: str, new: str) -> None:
    """Rename a tensor in nodes, and in the graphs inside them."""
    for node in nodes:
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                if name == old:
                    names[at] = new
        for inner in graphs_in(node):
            _rename(inner.node, old, new)
            for output in inner.output:
                if output.name == old:
                    output.name = new


def _used(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes without those that computed former targets, because ONNX Runtime would run them."""
    names = {value.name for value in graph.output}
    kept = []
    for node in reversed(nodes):
        if not names.isdisjoint(node.output):
            names.update(node.input, captured_names(node))
            kept.append(node)
    return kept[::-1]


def _unused_axis(graph: onnx.GraphProto) -> str:
    values = (*graph.input, *graph.output)
    used = {dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim}
    axis = "batch"
    while axis in used:
        axis = f"{axis}_"
    return axis


def _forget_shapes(graph: onnx.GraphProto, *, nested: bool) -> None:
    """Remove shapes in which the rows are still 1: those of intermediate tensors, and of graphs in nodes."""
    graph.ClearField("value_info")
    for value in (*graph.input, *graph.output) if nested else ():
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    for node in graph.node:
        for inner in graphs_in(node):
            _forget_shapes(inner, nested=True)


def _retarget(
    graph: onnx.GraphProto, node: onnx.NodeProto, target: Sequence[int]
) -> Iterable[onnx.NodeProto]:
    """Give a Reshape a new target; return the nodes that compute it, if its sizes are computed."""
    name = f"{node.output[0]}:rows"
    computed, node.input[1] = node.input[1], name
    if target:
        graph.initializer.append(numpy_helper.from_array(np.array(target, np.int64), name))
        return []
    parts = {"zero": [0], "start": [1], "end": [2**31 - 1]}
    graph.initializer.extend(
        numpy_helper.from_array(np.array(numbers, np.int64), f"{name}:{part}")
        for part, numbers in parts.items()
    )
    rest = f"{name}:rest"
    return [
        helper.make_node("Slice", [computed, f"{name}:start", f"{name}:end"], [rest], name=rest),
        helper.make_node("Concat", [f"{name}:zero", rest], [name], axis=0, name=name),
    ]


class ReshapeWalk(GraphWalk):
    """A walk that collects new targets of the main graph's Reshape nodes, as `FreedRows` has them.

    With `fixes`, a node that reshapes rows on axis 0 to a shape that begins with 1 has its new target in the walk, because
    the rows behind it depend on that. A computed target in which only one size counts rows becomes a constant, because
    ONNX Runtime would compute it in each run; in the file it is constant.
    """

    def __init__(self, model: onnx.ModelProto, decisions: Sequence[bool] = (), *, fixes: bool) -> None:
        super().__init__(model, decisions)
        self.found: list[tuple[str, tuple[int, ...]]] = []
        self._fixes = fixes
        self._opset = max((one.version for one in model.opset_import if not one.domain), default=1)
        # Nodes of functions and of graphs in nodes are not changed.
        self._own = {node.output[0] for node in model.graph.node if node.op_type == "Reshape"}

    def _node(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value]:
        sizes = self._target(node, scope)
        if sizes is None:
            return super()._node(node, scope)
        value = scope.get(node.input[0])
        on_axis_0 = value is not None and value.rows == RowAxis(0)
        computed = any(isinstance(size, Product) for size in sizes)
        fixes = self._fixes and on_axis_0 and sizes[:1] == [1]
        fixes = fixes and (self._opset >= _SLICE_WITH_INPUTS or not computed)
        if fixes:
            sizes[0] = 0
            scope = ChainMap({node.input[1]: of_content(vector_of(sizes))}, dict(scope))
        made = super()._node(node, scope)
        numbers = _numbers(made[0], keeps_axis_0=on_axis_0) if computed else tuple(sizes)
        if fixes or (computed and numbers):
            self.found.append((node.output[0], numbers))
        return made

    def _target(self, node: onnx.NodeProto, scope: Scope) -> list[Any] | None:
        """Return the target of a Reshape of the main graph; None for other nodes and unknown targets."""
        own = not self._depth and node.output[0] in self._own
        if node.op_type != "Reshape" or node.domain or not own or len(node.input) < 2:
            return None
        target = scope.get(node.input[1])
        if target is None or target.content is None or self.attributes(node).get("allowzero", 0):
            return None
        return list(target.content.flat)


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
