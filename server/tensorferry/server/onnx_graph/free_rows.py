"""A first axis fixed to 1: changes of a graph that make it variable, with the same answers for one row.

The changes only replace a 1 by a variable size, which is 1 if there is one row. So the changed graph computes the same for
one row as the file does. For more rows, the analysis must prove that they are independent.
"""

from __future__ import annotations

import os
import shutil
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tensorferry.server.onnx_graph.analysis import BatchAnalysis, RowMixing, analysis_of, inputs_of
from tensorferry.server.onnx_graph.graph_walk import GraphWalk, Scope
from tensorferry.server.onnx_graph.model_file import UnreadableModel, external_files, read_model
from tensorferry.server.onnx_graph.values import RowAxis, Value, of_content, vector_of

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
class FreedRows:
    """Changes of a graph. `inputs` have a first axis of 1 that becomes variable, and so have all such outputs.

    `reshapes` are nodes by the name of their output. The leading 1 of their target becomes 0, which copies the size of
    their input's first axis. The numbers are the whole new target; empty if it has sizes that are computed.
    """

    inputs: tuple[str, ...]
    reshapes: tuple[tuple[str, tuple[int, ...]], ...] = ()


def free_rows(path: Path) -> FreedRows:
    """Return the changes of a file with which its rows are proved independent; raise NotFreed if there are none.

    Targets of Reshape are changed only if the graph is not proved without, because each change makes another graph.
    """
    if path.is_file() and path.stat().st_size > _MOST_BYTES:
        raise NotFreed("the file is larger than 2 GB")
    try:
        read = read_model(path)
    except UnreadableModel as error:
        raise NotFreed(f"the file {error}") from error
    inputs = tuple(value.name for value in _callers_inputs(read) if _is_one(value))
    if not inputs:
        raise NotFreed("no input has a first axis of 1")
    freed = FreedRows(inputs)
    try:
        analysis = _analysed(read, freed)
        if analysis.finding is not RowMixing.SEPARATE:
            freed = FreedRows(inputs, _fixing_reshapes(read, freed))
            analysis = _analysed(read, freed) if freed.reshapes else analysis
    except Exception as error:
        raise NotFreed(f"the graph could not be analysed ({type(error).__name__}: {error})") from error
    if analysis.finding is not RowMixing.SEPARATE:
        raise NotFreed(*analysis.reasons)
    return freed


def write_freed(source: Path, freed: FreedRows, path: Path) -> None:
    """Write the changed model to a file. Its weights in other files are linked or copied beside it.

    Raises NotFreed if a weights file is outside the model's folder, and OSError if it cannot be written.
    """
    for name in external_files(source):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise NotFreed(f"its weights file {name!r} is outside the model's folder")
        target = path.parent / name
        # ONNX Runtime refuses symbolic links that leave the folder.
        weights = os.path.realpath(source.parent / name)
        if target.exists() and os.path.samefile(weights, target):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(weights, target)
        except OSError:
            shutil.copyfile(weights, target)
    model = onnx.load(str(source), load_external_data=False)
    _apply(model, freed)
    onnx.save(model, str(path))


def _callers_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constants]


def _is_one(value: onnx.ValueInfoProto) -> bool:
    dims = value.type.tensor_type.shape.dim
    return len(dims) > 0 and dims[0].dim_value == 1


def _analysed(read: onnx.ModelProto, freed: FreedRows) -> BatchAnalysis:
    return analysis_of(_changed(read, freed), freed.inputs)


def _changed(read: onnx.ModelProto, freed: FreedRows) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(read)
    _apply(model, freed)
    return model


def _apply(model: onnx.ModelProto, freed: FreedRows) -> None:
    """Change a model in place."""
    graph = model.graph
    axis = _unused_axis(graph)
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
    if len(nodes) > len(graph.node):
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)


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
        value.type.tensor_type.ClearField("shape")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
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


def _fixing_reshapes(read: onnx.ModelProto, freed: FreedRows) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the nodes that reshape rows on axis 0 to a shape that begins with 1, with their new targets."""
    model = _changed(read, freed)
    walk = _ReshapeWalk(model)
    walk.tensors_of(model.graph, {}, inputs_of(model, freed.inputs))
    return tuple(walk.found)


class _ReshapeWalk(GraphWalk):
    """A walk in which each such node has its new target, because the rows behind it depend on that."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self.found: list[tuple[str, tuple[int, ...]]] = []
        self._slices = max((one.version for one in model.opset_import if not one.domain), default=1)
        # Nodes of functions and of graphs in nodes are not changed.
        self._own = {node.output[0] for node in model.graph.node if node.op_type == "Reshape"}

    def _node(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value]:
        target = self._new_target(node, scope)
        if target is not None:
            numbers = tuple(size for size in target if isinstance(size, int))
            self.found.append((node.output[0], numbers if len(numbers) == len(target) else ()))
            scope = ChainMap({node.input[1]: of_content(vector_of(target))}, dict(scope))
        return super()._node(node, scope)

    def _new_target(self, node: onnx.NodeProto, scope: Scope) -> list[object] | None:
        if node.op_type != "Reshape" or node.domain or node.output[0] not in self._own or len(node.input) < 2:
            return None
        rows, shape = scope.get(node.input[0]), scope.get(node.input[1])
        if rows is None or rows.rows != RowAxis(0) or shape is None or shape.content is None:
            return None
        sizes = list(shape.content.flat)
        computed = not all(isinstance(size, int) for size in sizes)
        if sizes[:1] != [1] or self.attributes(node).get("allowzero", 0):
            return None
        if computed and self._slices < _SLICE_WITH_INPUTS:
            return None
        return [0, *sizes[1:]]
