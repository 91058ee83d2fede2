"""The walk through a graph: what is known of each tensor, from the inputs to the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
from onnx import helper

from tensorferry.server.onnx_graph import operators
from tensorferry.server.onnx_graph.operators import MixesRows, Node, NotKnown, Operator
from tensorferry.server.onnx_graph.reading import constant
from tensorferry.server.onnx_graph.sizes import counts_rows
from tensorferry.server.onnx_graph.values import Trouble, Value, joined

# Tensors by name, in a graph and those around it.
Scope = dict[str, Value]

# Numbers kept of a tensor: more are never axes or shapes.
_MOST_NUMBERS = 256


class Walk:
    """One pass through a model. `unsteady` collects nodes that take time that depends on values."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._opsets = {one.domain or operators.DOMAIN: one.version for one in model.opset_import}
        self.unsteady: list[str] = []

    def through(self, graph: onnx.GraphProto, outer: Mapping[str, Value], inputs: Scope) -> Scope:
        """All tensors of the graph by name, given those of its inputs and of the graph around it."""
        scope = dict(outer)
        for tensor in graph.initializer:
            scope[tensor.name] = constant(tensor)
        scope.update(inputs)
        for node in graph.node:
            values = self._node(node, scope)
            scope.update((name, value) for name, value in zip(node.output, values, strict=False) if name)
        return scope

    def _node(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value]:
        count = len(node.output)
        inputs = [scope.get(name, _MISSING) if name else None for name in node.input]
        label = label_of(node)
        found = operators.find(node.domain, node.op_type)
        given = [value for value in inputs if value is not None]
        if found is None:
            self.unsteady.append(f"{label} is of an operator whose time is not known")
            return _unknown_operator(label, given, count)
        self._check_steady(label, found, inputs)
        if not found.shape_only and any(value.trouble for value in given):
            return [Value(trouble=joined(value.trouble for value in given), by_values=True)] * count
        view = Node(
            node.op_type,
            self._opsets.get(node.domain or operators.DOMAIN, 1),
            inputs,
            count,
            {one.name: _attribute(one) for one in node.attribute},
            label,
        )
        try:
            values = _apply(found, view)
            sealed = [_sealed(value) for value in values]
        except MixesRows as why:
            sealed = [Value(trouble=Trouble(mixes=(f"{label} {why}",)))] * count
        except NotKnown as why:
            sealed = _not_known(f"{label} {why}", given, count)
        valued = not found.shape_only and any(value.by_values for value in given)
        return [replace(value, by_values=valued) for value in sealed]

    def _check_steady(self, label: str, found: Operator, inputs: Sequence[Value | None]) -> None:
        deciding = range(len(inputs)) if found.by_values else found.sizes
        for index in deciding:
            value = inputs[index] if index < len(inputs) else None
            if value is not None and value.by_values:
                self.unsteady.append(f"{label} makes a shape from values")
                return


_MISSING = Value(trouble=Trouble(unknown=("the graph uses a tensor that nothing makes",)), by_values=True)


def label_of(node: onnx.NodeProto) -> str:
    """How a node is called in a reason: its operator and its name, or that of its first output."""
    own = f"{node.domain}.{node.op_type}" if node.domain not in ("", operators.DOMAIN) else node.op_type
    name = node.name or next((output for output in node.output if output), "")
    return f"{own} {name}".rstrip()


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _apply(found: Operator, node: Node) -> Sequence[Value]:
    others = [value for at, value in enumerate(node.inputs) if value is not None and at not in found.sizes]
    counted = [value for value in others if value.counted]
    if counted and not found.shape_only and any(value.rows for value in others):
        raise MixesRows("makes the rows' values depend on how many rows a batch has")
    for index in found.sizes:
        if node.has(index) and node.input(index).rows is not None:
            raise NotKnown("makes a shape that depends on the rows' values")
    made = found.rule(node)
    values = [made] * node.outputs if isinstance(made, Value) else made
    if counted and not found.shape_only:
        values = [value if value.content is not None else replace(value, counted=True) for value in values]
    return values


def _sealed(value: Value) -> Value:
    """The value if what it says of the rows holds; a size that counts them may only be that of their own axis."""
    content = value.content
    if content is not None:
        if content.size > _MOST_NUMBERS:
            return replace(value, content=None)
        return replace(value, counted=any(counts_rows(number) for number in content.flat))
    if value.trouble is not None:
        return value
    for axis, size in enumerate(value.shape or ()):
        if counts_rows(size) and (value.rows is None or axis != value.rows.axis):
            raise NotKnown(f"makes an axis of size {size}, which depends on how many rows a batch has")
    if value.rows is not None and value.counted:
        raise MixesRows("makes the rows' values depend on how many rows a batch has")
    return value


def _unknown_operator(label: str, given: Sequence[Value], count: int) -> Sequence[Value]:
    trouble = joined(value.trouble for value in given)
    if trouble.mixes or trouble.unknown:
        return [Value(trouble=trouble, by_values=True)] * count
    return _not_known(f"{label} is of an operator that is not analysed", given, count)


def _not_known(reason: str, given: Sequence[Value], count: int) -> list[Value]:
    """Outputs of a node that could not be analysed: that matters only if rows go into it."""
    if all(value.is_free for value in given):
        return [Value(by_values=True)] * count
    return [Value(trouble=Trouble(unknown=(reason,)), by_values=True)] * count
