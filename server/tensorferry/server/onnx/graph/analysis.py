"""Analysis of a model's graph: are the rows of a batch independent?"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import onnx

from tensorferry.server.onnx.graph.bodies import Scope
from tensorferry.server.onnx.graph.graph_walk import GraphWalk
from tensorferry.server.onnx.graph.model_file import UnreadableModel, read_model
from tensorferry.server.onnx.graph.rules import (  # noqa: F401  (they fill the table of operators)
    convolutions,
    elementwise,
    features,
    indexing,
    matmul,
    per_row,
    random_numbers,
    recurrent,
    reductions,
    sequences,
    shapes,
    slicing,
)
from tensorferry.server.onnx.graph.sizes import NUMBER_OF_ROWS, ROWS, Size, Symbol, of_symbol
from tensorferry.server.onnx.graph.values import RowAxis, RowProblems, Value, merged_problems, not_analysed

_Walk = TypeVar("_Walk", bound=GraphWalk)

# Most conditions on lengths whose values are tried, so at most 7 walks.
_MOST_DECISIONS = 2


class RowMixing(enum.Enum):
    """The result of the analysis."""

    SEPARATE = "separate"
    """Each row of every output depends only on the same row of the inputs."""
    MIXES = "mixes"
    """A row's output depends on other rows, or an output does not have one row per input row."""
    UNKNOWN = "unknown"
    """A part of the graph could not be analysed."""


@dataclass(frozen=True, slots=True)
class BatchAnalysis:
    """The finding and its reasons: nodes that mix rows or could not be analysed. SEPARATE has no reasons."""

    finding: RowMixing
    reasons: tuple[str, ...] = ()


def analyse_batching(path: Path, batched_inputs: Collection[str]) -> BatchAnalysis:
    """Follow the rows of the given inputs, on axis 0, through the graph of a model.

    A file that cannot be read gives UNKNOWN with the reason. Large weights are not loaded. Never raises.
    """
    try:
        return analysis_of(read_model(path), batched_inputs)
    except Exception as error:
        return BatchAnalysis(RowMixing.UNKNOWN, (_not_analysed(error),))


def value_dependent_nodes(path: Path) -> tuple[str, ...]:
    """Return why the run time can depend on input values, not only on shapes; empty if it cannot."""
    try:
        model = read_model(path)
        walk = GraphWalk(model)
        walk.tensors_of(model.graph, {}, inputs_of(model, ()))
    except Exception as error:
        return (_not_analysed(error),)
    return tuple(dict.fromkeys(walk.value_dependent_nodes))


def _not_analysed(error: Exception) -> str:
    """Return the reason for a file that cannot be read or a graph on which the analysis fails."""
    if isinstance(error, UnreadableModel):
        return f"the file {error}"
    return f"the graph could not be analysed ({type(error).__name__}: {error})"


def analysis_of(
    model: onnx.ModelProto, batched: Collection[str], walk: GraphWalk | None = None
) -> BatchAnalysis:
    """Do the same with a model that has been read, by a new walk over it; may raise any exception."""
    if walk is not None:
        return _finding(model, walk.tensors_of(model.graph, {}, inputs_of(model, batched)))
    found = [_finding(model, tensors) for _, tensors in cases(model, batched, partial(GraphWalk, model))]
    return next((each for each in found if each.finding is not RowMixing.SEPARATE), found[0])


def cases(
    model: onnx.ModelProto, batched: Collection[str], start: Callable[[Sequence[bool]], _Walk]
) -> list[tuple[_Walk, Scope]]:
    """Return walks with all their tensors. Each run of the model goes as one of them does.

    `start` makes a walk with these decisions (see `GraphWalk`). There are several walks only if one leaves problems at
    outputs. If the several do, too, it is the only one.
    """
    first: tuple[_Walk, Scope] | None = None
    known: list[tuple[_Walk, Scope]] = []
    waiting: list[tuple[bool, ...]] = [()]
    while waiting:
        decisions = waiting.pop()
        walk = start(decisions)
        tensors = walk.tensors_of(model.graph, {}, inputs_of(model, batched))
        first = first or (walk, tensors)
        outputs = [tensors.get(output.name) for output in model.graph.output]
        if all(value is not None and value.problems is None for value in outputs):
            known.append((walk, tensors))
        elif walk.undecided and len(decisions) < _MOST_DECISIONS:
            waiting += [(*decisions, False), (*decisions, True)]
        else:
            return [first]
    return known


def _finding(model: onnx.ModelProto, tensors: Scope) -> BatchAnalysis:
    problems = merged_problems(
        _problems_of(output.name, tensors.get(output.name)) for output in model.graph.output
    )
    if problems is None:
        return BatchAnalysis(RowMixing.SEPARATE)
    if problems.mixes:
        return BatchAnalysis(RowMixing.MIXES, problems.mixes)
    return BatchAnalysis(RowMixing.UNKNOWN, problems.unknown)


def inputs_of(model: onnx.ModelProto, batched: Collection[str]) -> dict[str, Value]:
    """Return the inputs of a graph by name. Those that are batched have rows on axis 0."""
    # Before IR version 4 every initializer is listed among the inputs, but cannot be set by a caller.
    constants = {one.name for one in model.graph.initializer}
    inputs = {}
    for declared in model.graph.input:
        if declared.name in constants and model.ir_version < 4:
            continue
        if declared.name in constants and declared.name in batched:
            inputs[declared.name] = not_analysed(
                f"input {declared.name} has a default, which has no rows of a batch"
            )
        else:
            inputs[declared.name] = _input(declared, declared.name in batched)
    return inputs


def _input(declared: onnx.ValueInfoProto, batched: bool) -> Value:
    tensor = declared.type.tensor_type
    if not tensor.HasField("shape") or (batched and not tensor.shape.dim):
        if not batched:
            return Value(value_dependent=True)
        is_tensor = declared.type.HasField("tensor_type")
        why = "is declared without a shape" if is_tensor else "is no tensor"
        return not_analysed(f"input {declared.name} {why}")
    shape: list[Size] = []
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            shape.append(dim.dim_value)
        else:
            # By ONNX's rules, axes with the same name have the same length. A request that breaks this rule runs alone.
            name = dim.dim_param
            if not name:
                name = f"{declared.name!r}[{axis}]"
            elif not name.isidentifier() or name == ROWS.name:
                # So it does not look like a computed size, or one without a name.
                name = repr(name)
            shape.append(of_symbol(Symbol(name)))
    if not batched:
        return Value(tuple(shape), value_dependent=True)
    return Value((NUMBER_OF_ROWS, *shape[1:]), RowAxis(0), value_dependent=True)


def _problems_of(name: str, value: Value | None) -> RowProblems | None:
    """Return why an output does not have one independent row per input row; None if it does."""
    if value is None:
        return RowProblems(unknown=(f"no node produces output {name}",))
    if value.fails:
        return None
    if value.problems is not None:
        return value.problems
    rows = value.rows
    if value.row_indices:
        return RowProblems(mixes=(f"output {name} contains the indices of rows in the batch",))
    if rows == RowAxis(0):
        return None
    if rows is None:
        why = "it is the same for all rows"
    elif rows.axis:
        why = f"the rows are on its axis {rows.axis}"
    else:
        why = f"its axis 0 has the size {rows.size}"
    return RowProblems(mixes=(f"output {name} does not follow the batch axis: {why}",))
