"""Whether a model keeps the rows of a batch apart, by its graph."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import onnx

from tensorferry.server.onnx_graph.graph_walk import GraphWalk
from tensorferry.server.onnx_graph.model_file import UnreadableModel, read_model
from tensorferry.server.onnx_graph.rules import (  # noqa: F401  (they fill the table of operators)
    convolutions,
    elementwise,
    features,
    indexing,
    matmul,
    recurrent,
    reductions,
    shapes,
    slicing,
)
from tensorferry.server.onnx_graph.sizes import NUMBER_OF_ROWS, ROWS, Size, Symbol, of_symbol
from tensorferry.server.onnx_graph.values import RowAxis, RowProblems, Value, merged_problems


class RowMixing(enum.Enum):
    """What the graph says of the rows of a batch."""

    SEPARATE = "separate"
    """Each row of every output is computed from the same row of the inputs alone."""
    MIXES = "mixes"
    """A row's answer depends on other rows, or an output does not have one row for each of the inputs."""
    UNKNOWN = "unknown"
    """Some of the graph could not be analysed."""


@dataclass(frozen=True, slots=True)
class BatchAnalysis:
    """What was found, and why: the nodes that mix rows, or what could not be analysed; empty for SEPARATE."""

    finding: RowMixing
    reasons: tuple[str, ...] = ()


def analyse_batching(path: Path, batched_inputs: Collection[str]) -> BatchAnalysis:
    """Follow the rows of the inputs named, which have them on axis 0, through the graph of a model.

    A file that cannot be read is UNKNOWN, with the reason. Large weights are never loaded.
    """
    try:
        return _analyse(read_model(path), batched_inputs)
    except Exception as error:
        return BatchAnalysis(RowMixing.UNKNOWN, (_not_analysed(error),))


def value_dependent_nodes(path: Path) -> tuple[str, ...]:
    """Why the time of a run can depend on the inputs' values, and not only on their shapes; empty where it cannot."""
    try:
        model = read_model(path)
        walk = GraphWalk(model)
        walk.tensors_of(model.graph, {}, _inputs(model, ()))
    except Exception as error:
        return (_not_analysed(error),)
    return tuple(dict.fromkeys(walk.value_dependent_nodes))


def _not_analysed(error: Exception) -> str:
    """The reason for a file that is no model, or a model that the analysis fails on."""
    if isinstance(error, UnreadableModel):
        return f"the file {error}"
    return f"the graph could not be analysed ({type(error).__name__}: {error})"


def _analyse(model: onnx.ModelProto, batched: Collection[str]) -> BatchAnalysis:
    scope = GraphWalk(model).tensors_of(model.graph, {}, _inputs(model, batched))
    found_problems = []
    for output in model.graph.output:
        value = scope.get(output.name)
        found_problems.append(_problems_of(output.name, value))
    problems = merged_problems(found_problems)
    if problems.mixes:
        return BatchAnalysis(RowMixing.MIXES, problems.mixes)
    if problems.unknown:
        return BatchAnalysis(RowMixing.UNKNOWN, problems.unknown)
    return BatchAnalysis(RowMixing.SEPARATE)


def _inputs(model: onnx.ModelProto, batched: Collection[str]) -> dict[str, Value]:
    # Before version 4 of the format every initialiser is listed among the inputs, and none can be given.
    constants = {one.name for one in model.graph.initializer}
    inputs = {}
    for declared in model.graph.input:
        if declared.name in constants and model.ir_version < 4:
            continue
        if declared.name in constants and declared.name in batched:
            why = f"input {declared.name} has a default, which has no rows of a batch"
            inputs[declared.name] = Value(problems=RowProblems(unknown=(why,)), value_dependent=True)
        else:
            inputs[declared.name] = _input(declared, declared.name in batched)
    return inputs


def _input(declared: onnx.ValueInfoProto, batched: bool) -> Value:
    if not declared.type.HasField("tensor_type"):
        if not batched:
            return Value(value_dependent=True)
        return Value(
            problems=RowProblems(unknown=(f"input {declared.name} is no tensor",)), value_dependent=True
        )
    tensor = declared.type.tensor_type
    if not tensor.HasField("shape") or (batched and not tensor.shape.dim):
        if not batched:
            return Value(value_dependent=True)
        why = f"input {declared.name} is declared without a shape"
        return Value(problems=RowProblems(unknown=(why,)), value_dependent=True)
    shape: list[Size] = []
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            shape.append(dim.dim_value)
        else:
            # Axes of one name have one length, as the server requires of requests.
            name = dim.dim_param or f"{declared.name}[{axis}]"
            # Quoted where it could be taken for a size that is computed.
            shape.append(of_symbol(Symbol(name if name.isidentifier() and name != ROWS.name else repr(name))))
    if not batched:
        return Value(tuple(shape), value_dependent=True)
    return Value((NUMBER_OF_ROWS, *shape[1:]), RowAxis(0), value_dependent=True)


def _problems_of(name: str, value: Value | None) -> RowProblems | None:
    """Why an output is not one row for each row of the inputs; None when it is."""
    if value is None:
        return RowProblems(unknown=(f"output {name} is made by no node",))
    if value.problems is not None:
        return value.problems
    rows = value.rows
    if value.row_indices:
        return RowProblems(unknown=(f"output {name} has the places of rows in the batch",))
    if rows is None:
        return RowProblems(
            mixes=(f"output {name} does not follow the batch axis: it is the same for all rows",)
        )
    if rows.axis:
        return RowProblems(
            mixes=(f"output {name} does not follow the batch axis: the rows are on its axis {rows.axis}",)
        )
    if rows.outer == rows.inner == 1:
        return None
    why = f"output {name} does not follow the batch axis: its axis 0 has the size {rows.size}"
    return RowProblems(mixes=(why,))
