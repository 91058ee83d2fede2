"""A walk over a graph from its inputs to its outputs, which computes what is known of each tensor."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx
from onnx import helper

from tensorferry.server.onnx.graph import control_flow, operators
from tensorferry.server.onnx.graph.bodies import Scope
from tensorferry.server.onnx.graph.model_file import constant
from tensorferry.server.onnx.graph.operators import NOT_ANALYSED, USES_ROW_INDICES, Node, Operator
from tensorferry.server.onnx.graph.sizes import Product, counts_rows
from tensorferry.server.onnx.graph.values import (
    AlwaysFails,
    MixesRows,
    RowProblems,
    UnknownEffect,
    Value,
    has_row_counts,
    merged_problems,
    mixing,
    not_analysed,
)

# Functions by domain, name and overload; attributes by name.
_Functions = Mapping[tuple[str, str, str], onnx.FunctionProto]
_Attributes = Mapping[str, onnx.AttributeProto]

# Tensors with more numbers are not kept, because they are never axes or shapes.
_MOST_NUMBERS = 256
# ONNX Runtime prefers its operators of these domains to functions of the model that have the same names.
_OPERATOR_DOMAINS = ("ai.onnx", "com.microsoft")
# Maximum depth of nested functions. The format forbids recursion, but a file may contain it.
_DEEPEST = 40
# Maximum number of visited nodes. Bodies of loops and functions count once per visit; few graphs have 20,000 nodes.
_MOST_NODES = 100_000

_FAILS = Value(fails=True, value_dependent=True)
_MISSING = not_analysed("the graph uses a tensor that no node produces")


class GraphTooLarge(Exception):
    """The graph has more nodes than the analysis visits."""


class Attributes(UserDict[str, Any]):
    """Attribute values, decoded on access because those of tree ensembles are large."""

    def __getitem__(self, name: str) -> Any:
        value = helper.get_attribute_value(self.data[name])
        return value.decode(errors="replace") if isinstance(value, bytes) else value


class GraphWalk:
    """One pass over a model. `value_dependent_nodes` collects the reasons why its run time may depend on values.

    An If whose condition depends on the lengths of axes takes one branch for all requests of a batch, because their
    shapes are equal. `decisions` are the values of such conditions, in the order in which the pass finds them. One more
    sets `undecided`; of its If both branches are followed. Not so in a repeated graph, where lengths may change.
    """

    def __init__(self, model: onnx.ModelProto, decisions: Sequence[bool] = ()) -> None:
        self.value_dependent_nodes: list[str] = []
        self.undecided = False
        self._left_decisions = list(decisions)
        self._decided: dict[Product, bool] = {}
        self._repeated = 0
        self._functions: _Functions = {(one.domain, one.name, one.overload): one for one in model.functions}
        self._opsets = _opsets(model.opset_import)
        self._bound: _Attributes = {}
        # The number of functions around the node that is analysed.
        self._depth = 0
        self._nodes_left = _MOST_NODES

    def tensors_of(self, graph: onnx.GraphProto, outer: Scope, inputs: Scope) -> dict[str, Value | None]:
        """Return all tensors of the graph by name, given its inputs and the tensors of the graph around it."""
        scope: dict[str, Value | None] = dict(outer)
        for tensor in graph.initializer:
            scope[tensor.name] = constant(tensor)
        for sparse in graph.sparse_initializer:
            scope[sparse.values.name] = Value(tuple(sparse.dims))
        scope.update(inputs)
        self._run(graph.node, scope)
        return scope

    def decision(self, condition: Value) -> bool | None:
        """Return the value that is assumed for a condition on lengths; None for any other and without a decision."""
        content = condition.content
        if self._repeated or content is None or content.size != 1:
            return None
        number = content.reshape(-1)[0]
        if not isinstance(number, Product) or counts_rows(number):
            return None
        if number not in self._decided:
            if not self._left_decisions:
                self.undecided = True
                return None
            self._decided[number] = self._left_decisions.pop(0)
        return self._decided[number]

    def repeatedly(self, follow: Callable[[], list[Value]]) -> list[Value]:
        """Return what `follow` does in a repeated graph."""
        self._repeated += 1
        try:
            return follow()
        finally:
            self._repeated -= 1

    def _run(self, nodes: Iterable[onnx.NodeProto], scope: dict[str, Value | None]) -> None:
        for node in _topological_order(nodes):
            self._nodes_left -= 1
            if self._nodes_left < 0:
                raise GraphTooLarge(
                    f"it has more than {_MOST_NODES} nodes, counting those in loops once per pass"
                )
            values = self._node(node, scope)
            scope.update((name, value) for name, value in zip(node.output, values, strict=False) if name)

    def _node(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value]:
        count = len(node.output)
        inputs = [scope.get(name, _MISSING) if name else None for name in node.input]
        label = label_of(node)
        domain = node.domain or operators.DOMAIN
        function = self._functions.get((node.domain, node.op_type, node.overload))
        if function is not None and domain.startswith(_OPERATOR_DOMAINS):
            return _unknown_effect(
                f"{label} is a function in a domain of ONNX Runtime's operators", inputs, count
            )
        if function is not None:
            return self._call(function, node, inputs, {})
        if any(value is not None and value.fails for value in inputs):
            return [_FAILS] * count
        if domain == operators.DOMAIN and node.op_type in control_flow.OPERATORS:
            return self._control_flow(node, label, inputs, scope)
        found = operators.find(domain, node.op_type)
        if found is None:
            return self._by_schema(domain, node, label, inputs, scope)
        shaping = (
            inputs
            if found.shape_from_values
            else [inputs[at] for at in found.shape_inputs if at < len(inputs)]
        )
        if any(value is not None and value.value_dependent for value in shaping):
            self.value_dependent_nodes.append(f"{label} computes a shape from values")
        opset = self._opsets.get(domain, 1)
        view = Node(node.op_type, opset, inputs, count, self.attributes(node), label)
        # The shape of a tensor may be known although its rows are not.
        have_shapes = all(value is not None and value.shape is not None for value in inputs)
        counting = [] if found.accepts_problems or (found.shape_only and have_shapes) else inputs
        values = self._apply_rule(label, counting, inputs, count, lambda: _apply(found, view))
        valued = not found.shape_only and any(value is not None and value.value_dependent for value in inputs)
        return [
            value
            if value.value_dependent is (depends := valued or value.problems is not None)
            else replace(value, value_dependent=depends)
            for value in values
        ]

    def _control_flow(
        self, node: onnx.NodeProto, label: str, inputs: Sequence[Value | None], scope: Scope
    ) -> Sequence[Value]:
        """Analyse a node with graphs inside.

        What is unknown of its inputs makes all outputs unknown, but hides no node inside that mixes rows.
        """
        around = [*inputs, *(scope.get(name) for name in control_flow.captured_names(node))]
        doubts: list[str] = []
        values = self._apply_rule(
            label,
            [],
            around,
            len(node.output),
            lambda: control_flow.OPERATORS[node.op_type](self, node, label, inputs, scope, doubts),
        )
        if all(value is None or value.is_free for value in around):
            return values
        found = merged_problems(
            (RowProblems(unknown=tuple(doubts)), *(value.problems for value in inputs if value is not None))
        )
        if found is None:
            return values
        return [
            Value(problems=merged_problems((found, value.problems)), value_dependent=True) for value in values
        ]

    def _apply_rule(
        self,
        label: str,
        inputs: Sequence[Value | None],
        used: Sequence[Value | None],
        count: int,
        rule: Callable[[], Sequence[Value]],
    ) -> Sequence[Value]:
        """Apply a rule; return its outputs, or outputs with the problem that it found. `used` has all its inputs."""
        problems = merged_problems(value.problems for value in inputs if value is not None)
        if problems is not None:
            return [Value(problems=problems, value_dependent=True)] * count
        try:
            values: Sequence[Value] = [_checked(value) for value in rule()]
        except AlwaysFails:
            return [_FAILS] * count
        except MixesRows as why:
            return [mixing(f"{label} {why}")] * count
        except (UnknownEffect, ArithmeticError) as why:
            return _unknown_effect(f"{label} {why}", used, count)
        return values

    def _by_schema(
        self, domain: str, node: onnx.NodeProto, label: str, inputs: Sequence[Value | None], scope: Scope
    ) -> Sequence[Value]:
        """Analyse an operator without a rule by the function body that the onnx package has for it, if any."""
        try:
            own = "" if domain == operators.DOMAIN else domain
            schema = onnx.defs.get_schema(node.op_type, self._opsets.get(domain, 1), own)
            body = schema.function_body if schema.has_function else None  # type: ignore[attr-defined]
        except Exception:  # onnx raises its own error type for an unknown operator
            body = None
        if body is not None:
            defaults = {
                name: one.default_value for name, one in schema.attributes.items() if one.default_value.type
            }
            return self._call(body, node, inputs, defaults)
        self.value_dependent_nodes.append(f"{label} is an operator with unknown run time")
        problems = merged_problems(value.problems for value in inputs if value is not None)
        if problems is not None:
            return [Value(problems=problems, value_dependent=True)] * len(node.output)
        captured = [scope.get(name) for name in control_flow.captured_names(node)]
        return _unknown_effect(f"{label} {NOT_ANALYSED}", [*inputs, *captured], len(node.output))

    def _call(
        self,
        function: onnx.FunctionProto,
        node: onnx.NodeProto,
        inputs: Sequence[Value | None],
        defaults: _Attributes,
    ) -> Sequence[Value]:
        if self._depth > _DEEPEST:
            return _unknown_effect(f"{label_of(node)} calls itself", inputs, len(node.output))
        bound = {**defaults, **{one.name: one for one in function.attribute_proto}}
        bound.update(self.attributes(node).data)
        given = itertools.chain(inputs, itertools.repeat(None))
        scope: dict[str, Value | None] = dict(zip(function.input, given, strict=False))
        around = self._opsets, self._bound
        self._opsets, self._bound = {**self._opsets, **_opsets(function.opset_import)}, bound
        self._depth += 1
        try:
            self._run(function.node, scope)
        finally:
            self._opsets, self._bound = around
            self._depth -= 1
        return [scope.get(name) or _MISSING for name in function.output]

    def attributes(self, node: onnx.NodeProto) -> Attributes:
        """Return the node's attributes. In a function, references to its attributes get the values of the call."""
        found = Attributes()
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                found.data[attribute.name] = attribute
            elif attribute.ref_attr_name in self._bound:
                found.data[attribute.name] = self._bound[attribute.ref_attr_name]
        return found


def _topological_order(nodes: Iterable[onnx.NodeProto]) -> Sequence[onnx.NodeProto]:
    """Return the nodes in topological order; in the given order if the graph has a cycle.

    The format requires sorted nodes, but ONNX Runtime accepts any order and its FP16 converter produces unsorted ones.
    """
    listed = list(nodes)
    producers = {name: index for index, node in enumerate(listed) for name in node.output if name}
    needs = {
        index: {
            producers[name] for name in (*node.input, *control_flow.captured_names(node)) if name in producers
        }
        for index, node in enumerate(listed)
    }
    if all(need < index for index, needed in needs.items() for need in needed):
        return listed
    try:
        return [listed[index] for index in TopologicalSorter(needs).static_order()]
    except CycleError:
        return listed


def label_of(node: onnx.NodeProto) -> str:
    """Return a node's label in a reason: its operator and its name, or the name of its first output."""
    own = f"{node.domain}.{node.op_type}" if node.domain not in ("", operators.DOMAIN) else node.op_type
    name = node.name or next((output for output in node.output if output), "")
    return f"{own} {name}".rstrip()


def _opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {one.domain or operators.DOMAIN: one.version for one in imports}


def _apply(found: Operator, node: Node) -> Sequence[Value]:
    others = [
        value for at, value in enumerate(node.inputs) if value is not None and at not in found.shape_inputs
    ]
    depends_on_row_count = not found.shape_only and any(value.depends_on_row_count for value in others)
    if depends_on_row_count and any(value.rows for value in others):
        raise MixesRows("makes the rows' values depend on the number of rows in the batch")
    for at, value in enumerate(node.inputs):
        if value is None or not (at in found.shape_inputs or found.shape_from_values):
            continue
        if value.rows is not None and at in found.shape_inputs:
            raise UnknownEffect("computes a shape that depends on the rows' values")
        if value.content is None and value.depends_on_row_count:
            raise UnknownEffect("computes a shape that may depend on the number of rows in the batch")
    if not found.row_indices and any(value.row_indices for value in node.given):
        raise UnknownEffect(USES_ROW_INDICES)
    iterations = frozenset[str]().union(*(value.iterations for value in node.given))
    picked = {value.picked for value in node.given if value.picked}
    if any(one.isdisjoint(other) for one in picked for other in picked):
        raise MixesRows("combines one row with another")
    made = found.rule(node)
    values = [made] * node.outputs if isinstance(made, Value) else made
    # Unchanged without need, because copies of values take much of the walk's time.
    if found.shape_only or not (depends_on_row_count or iterations or picked):
        return values
    return [
        value
        if value.content is not None
        else replace(
            value,
            depends_on_row_count=value.depends_on_row_count or depends_on_row_count,
            iterations=value.iterations | iterations,
            picked=value.picked.union(*picked),
        )
        for value in values
    ]


def _checked(value: Value) -> Value:
    """Return the value if it is consistent: only the size of the row axis may depend on the number of rows."""
    content = value.content
    if content is not None:
        depends_on_row_count = has_row_counts(content)
        if depends_on_row_count is value.depends_on_row_count and content.size <= _MOST_NUMBERS:
            return value
        known = content if content.size <= _MOST_NUMBERS else None
        return replace(value, content=known, depends_on_row_count=depends_on_row_count)
    if value.problems is not None:
        return value
    for axis, size in enumerate(value.shape or ()):
        if counts_rows(size) and (value.rows is None or axis != value.rows.axis):
            raise UnknownEffect(
                f"produces an axis of size {size}, which depends on the number of rows in the batch"
            )
    if value.rows is not None:
        if value.shape is None or value.shape[value.rows.axis] != value.rows.size:
            raise UnknownEffect("produces a batch axis of another size")
        if counts_rows(value.rows.outer) or counts_rows(value.rows.inner):
            raise UnknownEffect("produces a size that depends on the number of rows in the batch")
        if value.depends_on_row_count:
            raise MixesRows("makes the rows' values depend on the number of rows in the batch")
        if value.picked:
            raise UnknownEffect("combines all rows with the row of a loop's iteration")
    return value


def _unknown_effect(reason: str, inputs: Sequence[Value | None], count: int) -> list[Value]:
    """Return the outputs of a node that could not be analysed; this is a problem only if an input has rows."""
    if all(value is None or value.is_free for value in inputs):
        return [Value(value_dependent=True)] * count
    return [not_analysed(reason)] * count
