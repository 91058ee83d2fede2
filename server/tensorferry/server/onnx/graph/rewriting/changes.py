"""Changes of a graph that make its batch axis variable, and the copy of a file with them."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tensorferry.server.onnx.graph.control_flow import captured_names
from tensorferry.server.onnx.graph.model_file import (
    UnreadableModel,
    external_files,
    graphs_in,
    read_model,
)

# The limit of a protobuf message, with a reserve for what is added.
_MOST_BYTES = 2**31 - 2**20
# The tensor of a copy with the number of rows.
_ROWS = "batch:rows"
# The end of an axis.
_END = 2**31 - 1


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


# Changes of a node of the main graph, which `node` names by its first output. `apply` changes the node, and returns nodes
# that compute its new inputs.


@dataclass(frozen=True, slots=True)
class NewTarget:
    """A Reshape, or an Expand, gets a new target.

    It is empty if only its leading 1 becomes 0, which copies the size of the input's first axis; its other sizes are computed.
    """

    node: str
    sizes: tuple[int, ...]

    def apply(self, graph: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Set the target."""
        name = f"{self.node}:rows"
        computed, node.input[1] = node.input[1], name
        # 0 copies a size only without it.
        _set_attributes(node, [one for one in node.attribute if one.name != "allowzero"])
        if self.sizes:
            _add_constant(graph, name, self.sizes)
            return []
        parts = {"zero": [0], "start": [1], "end": [_END]}
        zero, *bounds = (_add_constant(graph, f"{name}:{part}", numbers) for part, numbers in parts.items())
        rest = f"{name}:rest"
        return [
            helper.make_node("Slice", [computed, *bounds], [rest], name=rest),
            helper.make_node("Concat", [zero, rest], [name], axis=0, name=name),
        ]


@dataclass(frozen=True, slots=True)
class NewSizes:
    """A Resize gets new sizes, in which 0 stands for the number of rows."""

    node: str
    sizes: tuple[int, ...]

    def apply(self, graph: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Set the sizes."""
        node.input[3] = f"{self.node}:sizes"
        return [_sizes(graph, node.input[3], self.sizes)]


@dataclass(frozen=True, slots=True)
class GatherInRows:
    """A Gather from rows that are merged on axis 0 gathers from each, of this shape, on axis 1."""

    node: str
    row: tuple[int, ...]

    def apply(self, graph: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Separate the rows, and take the indices of the only row in the file."""
        name = self.node
        data, indices = node.input
        node.input[:] = [f"{name}:data", f"{name}:indices"]
        _set_attributes(node, [helper.make_attribute("axis", 1)])
        target = _add_constant(graph, f"{name}:target", [-1, *self.row])
        first = _add_constant(graph, f"{name}:first", 0)
        return [
            helper.make_node("Reshape", [data, target], [node.input[0]], name=node.input[0]),
            helper.make_node("Gather", [indices, first], [node.input[1]], axis=0, name=node.input[1]),
        ]


@dataclass(frozen=True, slots=True)
class GatherInBatch:
    """A GatherND has an axis of the batch, in place of indices on axis 0."""

    node: str

    def apply(self, graph: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Leave out the indices on axis 0."""
        name = f"{self.node}:indices"
        indices, node.input[1] = node.input[1], name
        _set_attributes(node, [helper.make_attribute("batch_dims", 1)])
        parts = {"start": [1], "end": [_END], "axis": [-1]}
        bounds = [_add_constant(graph, f"{name}:{part}", numbers) for part, numbers in parts.items()]
        return [helper.make_node("Slice", [indices, *bounds], [name], name=name)]


@dataclass(frozen=True, slots=True)
class RepeatedInput:
    """An input that is the same for all rows is repeated for each, along an axis.

    `number` is the input's, and `rank` its number of axes.
    """

    node: str
    number: int
    axis: int
    rank: int

    def apply(self, graph: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Repeat the input."""
        name = f"{self.node}:input{self.number}"
        own, node.input[self.number] = node.input[self.number], name
        sizes = [0 if axis == self.axis else 1 for axis in range(self.rank)]
        return [
            _sizes(graph, f"{name}:repeats", sizes),
            helper.make_node("Tile", [own, f"{name}:repeats"], [name], name=name),
        ]


NodeChange = NewTarget | NewSizes | GatherInRows | GatherInBatch | RepeatedInput


@dataclass(frozen=True, slots=True)
class FreedRows:
    """Changes of a graph. `inputs` have a first axis of 1 that becomes variable, and so have all such outputs.

    `nodes` are changed in this order. `axes` has inputs and outputs whose batch axis is another one, which the changes move
    to the front. With `keeps_defaults`, callers cannot set the inputs that have defaults.
    """

    inputs: tuple[str, ...]
    nodes: tuple[NodeChange, ...] = ()
    axes: tuple[MovedAxis, ...] = ()
    keeps_defaults: bool = False


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


def is_one(value: onnx.ValueInfoProto) -> bool:
    """Return whether the first axis of a tensor is fixed to 1."""
    dims = value.type.tensor_type.shape.dim
    return len(dims) > 0 and dims[0].dim_value == 1


def _apply(model: onnx.ModelProto, freed: FreedRows) -> None:
    """Change a model in place."""
    graph = model.graph
    if freed.keeps_defaults:
        required = [onnx.ValueInfoProto.FromString(one.SerializeToString()) for one in callers_inputs(model)]
        del graph.input[:]
        graph.input.extend(required)
    axis = _unused_axis(graph)
    tensors = {value.name: value for value in (*graph.input, *graph.output)}
    for moved in freed.axes:
        _move(graph, tensors[moved.name], moved, is_input=moved.name in freed.inputs)
    for value in (*(value for value in graph.input if value.name in freed.inputs), *graph.output):
        if is_one(value):
            value.type.tensor_type.shape.dim[0].dim_param = axis
    _forget_shapes(graph, nested=False)
    for function in model.functions:
        function.ClearField("value_info")
    if not freed.nodes:
        return
    changes: dict[str, list[NodeChange]] = {}
    for change in freed.nodes:
        changes.setdefault(change.node, []).append(change)
    counts_rows = any(isinstance(change, NewSizes | RepeatedInput) for change in freed.nodes)
    nodes = _count_rows(graph, freed.inputs[0]) if counts_rows else []
    for node in graph.node:
        for change in changes.get(node.output[0], ()) if node.output else ():
            nodes += change.apply(graph, node)
        nodes.append(node)
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
    # Their order says nothing: some converters write unsorted nodes.
    producers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    kept: set[int] = set()
    waiting = [value.name for value in graph.output]
    while waiting:
        at = producers.get(waiting.pop())
        if at is not None and at not in kept:
            kept.add(at)
            waiting += [*nodes[at].input, *captured_names(nodes[at])]
    return [node for at, node in enumerate(nodes) if at in kept]


def _unused_axis(graph: onnx.GraphProto) -> str:
    values = (*graph.input, *graph.output)
    used = {dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim}
    axis = "batch"
    while axis in used:
        axis = f"{axis}_"
    return axis


def _forget_shapes(graph: onnx.GraphProto, *, nested: bool) -> None:
    """Remove sizes in which the rows are still 1: those of intermediate tensors, and of graphs in nodes.

    The ranks of the latter stay, because ONNX Runtime must know that a loop's number is a scalar.
    """
    graph.ClearField("value_info")
    for value in (*graph.input, *graph.output) if nested else ():
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            dim.Clear()
    for node in graph.node:
        for inner in graphs_in(node):
            _forget_shapes(inner, nested=True)


def _set_attributes(node: onnx.NodeProto, attributes: Sequence[onnx.AttributeProto]) -> None:
    del node.attribute[:]
    node.attribute.extend(attributes)


def _add_constant(graph: onnx.GraphProto, name: str, numbers: int | Sequence[int]) -> str:
    """Add integers as an initializer; return its name."""
    graph.initializer.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
    return name


def _count_rows(graph: onnx.GraphProto, batched: str) -> list[onnx.NodeProto]:
    """Return nodes that compute the number of rows of an input."""
    shape, axis = f"{_ROWS}:shape", _add_constant(graph, f"{_ROWS}:axis", [0])
    return [
        helper.make_node("Shape", [batched], [shape], name=shape),
        helper.make_node("Gather", [shape, axis], [_ROWS], name=_ROWS),
    ]


def _sizes(graph: onnx.GraphProto, name: str, sizes: Sequence[int]) -> onnx.NodeProto:
    """Return a node that makes a vector of sizes, in which 0 stands for the number of rows."""
    at = sizes.index(0)
    before = _add_constant(graph, f"{name}:before", sizes[:at])
    behind = _add_constant(graph, f"{name}:behind", sizes[at + 1 :])
    return helper.make_node("Concat", [before, _ROWS, behind], [name], axis=0, name=name)
