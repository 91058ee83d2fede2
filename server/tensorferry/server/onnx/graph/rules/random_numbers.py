"""Operators that draw random numbers, which mixes rows: a row gets other numbers in each run, and beside other rows."""

from __future__ import annotations

from dataclasses import replace

from tensorferry.server.onnx.graph.operators import MICROSOFT, Node, operator
from tensorferry.server.onnx.graph.row_axis import broadcast, require_rows_only_in
from tensorferry.server.onnx.graph.values import Value, mixing, not_analysed

_ONNX = "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike"
_MICROSOFT = "Sampling"
# Those that draw numbers, or may: Dropout does in training mode.
RANDOM_OPERATORS = frozenset((*_ONNX.split(), _MICROSOFT, "Dropout", "BiasDropout", "BitmaskDropout"))


@operator(_ONNX, accepts_problems=True)
@operator(_MICROSOFT, MICROSOFT, accepts_problems=True, shape_from_values=True)
def random(node: Node) -> Value:
    """Draw numbers. A seed fixes only the order in which a session draws them."""
    shape = None
    if node.operator in ("RandomNormal", "RandomUniform"):
        shape = tuple(node.attribute("shape", ()))
    elif node.operator in ("Bernoulli", "RandomNormalLike", "RandomUniformLike"):
        shape = node.input(0).shape
    why = "is random, also with a seed: a row gets other numbers in each run"
    # The shape is not random.
    return replace(mixing(f"{node.label} {why}"), shape=shape)


@operator("Dropout", accepts_problems=True)
def dropout(node: Node) -> list[Value]:
    """Set random elements to zero in training mode; identity otherwise."""
    value = node.input(0)
    if not _sets_to_zero(node):
        if value.problems is not None:
            return [value, value]
        require_rows_only_in(node, 0)
        return [broadcast([value])] * 2
    found = mixing(f"{node.label} is in training mode, where it is random")
    if node.input(2).content is None:
        found = not_analysed(f"{node.label} may be in training mode, where it is random")
    return [replace(found, shape=value.shape)] * 2


def _sets_to_zero(node: Node) -> bool:
    """Return whether the node is, or may be, in training mode with a ratio other than 0."""
    if not node.has(2):
        return False
    contents = [node.input(at).content if node.has(at) else None for at in (1, 2)]
    return all(content is None or any(content.flat) for content in contents)
