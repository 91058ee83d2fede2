"""Graphs inside nodes: their outputs, and what a repeated graph passes on from one iteration to the next."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import onnx

from tensorferry.server.onnx.graph.operators import USES_ROW_INDICES
from tensorferry.server.onnx.graph.sizes import Product, unknown
from tensorferry.server.onnx.graph.values import UnknownEffect, Value, merged_problems, mixing, not_analysed

if TYPE_CHECKING:
    from tensorferry.server.onnx.graph.graph_walk import GraphWalk

# Most passes over a loop's body to reach a fixed point.
_PASSES = 12

# Tensors by name, of a graph and the graphs around it. None is an input that a function call leaves out.
Scope = Mapping[str, Value | None]
Inputs = Sequence[Value | None]


class OverRows(enum.IntEnum):
    """Whether the iterations of a loop are the rows of the batch, by what decides their number."""

    NO = 0
    MAYBE = 1
    """What decides could not be analysed."""
    YES = 2
    """It depends on the number of rows."""


def over_rows(deciding: Value) -> OverRows:
    """Return the same for a value that decides the number of iterations."""
    if deciding.problems is not None:
        return OverRows.MAYBE
    if deciding.depends_on_row_count and number_of(deciding) is None:
        return OverRows.YES
    return OverRows.NO


def number_of(value: Value) -> int | None:
    """Return the only element of a tensor as an integer; None if it is unknown."""
    if value.content is None or value.content.size != 1:
        return None
    number = value.content.reshape(-1)[0]
    return None if isinstance(number, Product) else int(number)


def given(value: Value | None) -> Value:
    """Return a required value; raise UnknownEffect if it is missing."""
    if value is None:
        raise UnknownEffect("lacks an input or output")
    return value


def outputs_of(walk: GraphWalk, graph: onnx.GraphProto, scope: Scope, inputs: Scope) -> list[Value]:
    """Return the outputs of a graph within a node."""
    within = walk.tensors_of(graph, scope, inputs)
    return [given(within[output.name]) for output in graph.output]


def repeated_outputs_of(walk: GraphWalk, graph: onnx.GraphProto, scope: Scope, inputs: Scope) -> list[Value]:
    """Return the outputs of a graph that runs any number of times, perhaps never."""
    found = walk.repeatedly(lambda: outputs_of(walk, graph, scope, inputs))
    return [not_analysed("a repeated graph fails") if value.fails else value for value in found]


def attempted(label: str, compute: Callable[[], Value], used: Iterable[Value]) -> Value:
    """Return a computed value, or one with the problem if its effect is unknown. `used` is what it is computed from."""
    try:
        return compute()
    except UnknownEffect as why:
        if all(value.is_free for value in used):
            return Value(value_dependent=True)
        return not_analysed(f"{label} {why}")


def unnumbered(value: Value) -> Value:
    """Return the value; raise UnknownEffect if it has row indices."""
    if value.row_indices:
        raise UnknownEffect(USES_ROW_INDICES)
    return value


def merged(name: str, one: Value, other: Value) -> Value:
    """Return what is known of a tensor that is one of two. Sizes that differ become unknown sizes named by `name`."""
    if one.fails or other.fails:
        return other if one.fails else one
    valued = one.value_dependent or other.value_dependent
    if one.problems is not None or other.problems is not None:
        return Value(problems=merged_problems((one.problems, other.problems)), value_dependent=True)
    if unnumbered(one).rows != unnumbered(other).rows:
        raise UnknownEffect("produces a tensor whose row axis depends on the branch")
    both = Value(
        rows=one.rows,
        depends_on_row_count=one.depends_on_row_count or other.depends_on_row_count,
        value_dependent=valued,
        iterations=one.iterations | other.iterations,
        picked=one.picked | other.picked,
    )
    same = one.content is not None and other.content is not None and one.content.shape == other.content.shape
    if same and all(a == b for a, b in zip(one.content.flat, other.content.flat, strict=True)):  # type: ignore[union-attr]
        return replace(one, value_dependent=valued)
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        if both.rows is not None or both.depends_on_row_count:
            raise UnknownEffect("produces a tensor whose rank depends on the branch")
        return both
    sizes = tuple(
        a if a == b else unknown(f"{name}.{axis}", a, b)
        for axis, (a, b) in enumerate(zip(one.shape, other.shape, strict=True))
    )
    return replace(both, shape=sizes)


class Repetition:
    """A graph that runs repeatedly. Its state is what it passes on from one iteration to the next. `name` is unique."""

    def __init__(self, walk: GraphWalk, body: onnx.GraphProto, scope: Scope, label: str, name: str) -> None:
        self.name = name
        self._walk = walk
        self._body = body
        self._scope = scope
        self._label = label

    def run(
        self,
        state: Inputs,
        over_rows: OverRows,
        *,
        first: Sequence[Value] = (),
        last: Sequence[Value] = (),
        skipped: int = 0,
    ) -> tuple[list[Value], list[Value]]:
        """Return the state at a fixed point, and the other outputs of the body.

        The body's inputs are `first`, the state and `last`. Among its outputs, `skipped` ones precede the state.
        """
        names = [one.name for one in self._body.input]
        returned = [one.name for one in self._body.output[skipped:]]
        kinds = list(map(self._kind, names[len(first) :], returned[: len(state)]))
        now = [_in_loop(self._label, value) for value in state]
        for _ in range(_PASSES):
            own = frozenset({self.name} if over_rows else ())
            varying = [replace(value, iterations=value.iterations | own) for value in (*first, *now)]
            inputs = dict(zip(names, [*varying, *last], strict=False))
            found = repeated_outputs_of(self._walk, self._body, self._scope, inputs)
            carried = found[skipped : skipped + len(now)]
            new = [
                before
                if over_rows and kinds[at] == "Identity"
                else self._passed_on(at, before, after, over_rows, kinds[at] == "Concat")
                for at, (before, after) in enumerate(zip(now, carried, strict=True))
            ]
            if new == now:
                others = [*found[:skipped], *found[skipped + len(now) :]]
                if any(
                    begin is not None and begin.shape != end.shape
                    for begin, end in zip(state, now, strict=True)
                ):
                    # Sizes of the state are those of the end; others are of any iteration.
                    others = [self._of_any_iteration(at, value) for at, value in enumerate(others)]
                return now, others
            now = new
        raise UnknownEffect("passes on tensors whose shape changes in each iteration")

    def _passed_on(self, at: int, before: Value, after: Value, over_rows: OverRows, collects: bool) -> Value:
        """Return the state of the next iteration. `collects`: it is joined with what the iteration computes."""
        if self.name in after.picked and collects:
            return not_analysed(f"{self._label} collects rows of the batch")
        if self.name in after.picked:
            return mixing(f"{self._label} passes values of one row on to the next rows")
        if over_rows is OverRows.YES and after.rows is not None and self.name in after.iterations:
            return mixing(f"{self._label} makes the rows' values depend on the number of rows in the batch")
        return attempted(
            self._label,
            lambda: merged(f"{self.name}.{at}", before, _without_content(after)),
            (before, after),
        )

    def _of_any_iteration(self, at: int, value: Value) -> Value:
        """Return an output of the body with sizes that no other tensor has."""
        if value.shape is None or value.problems is not None:
            return value
        rows = value.rows
        if rows is not None and not (isinstance(rows.inner, int) and isinstance(rows.outer, int)):
            return not_analysed(f"{self._label} collects rows of different lengths")
        return replace(
            value,
            content=None,
            shape=tuple(
                size
                if isinstance(size, int) or (rows is not None and axis == rows.axis)
                else unknown(f"{self.name}.any{at}.{axis}", size)
                for axis, size in enumerate(value.shape)
            ),
        )

    def _kind(self, before: str, after: str) -> str:
        """Return the operator that makes a part of the state from the same part before it.

        It is "Identity" for a part that is passed on unchanged, and "" if the operator does not take the part before.
        """
        origins = {name: node for node in self._body.node for name in node.output}
        for _ in range(len(origins) + 1):
            if after == before:
                return "Identity"
            node = origins.get(after)
            if node is None or node.op_type != "Identity":
                return node.op_type if node is not None and before in node.input else ""
            after = node.input[0]
        return ""


def _in_loop(label: str, value: Value | None) -> Value:
    """Return a part of the state before the first iteration."""
    if value is None:
        return Value()
    return attempted(label, partial(_without_content, value), (value,))


def _without_content(value: Value) -> Value:
    """Return a tensor without its constant content, which changes in each iteration."""
    return replace(unnumbered(value), content=None)
