"""Operators that draw random numbers, which mixes rows: a row gets other numbers in each run, and beside other rows."""

from __future__ import annotations

from tensorferry.server.onnx_graph.operators import MICROSOFT, Node, operator
from tensorferry.server.onnx_graph.row_axis import broadcast, require_rows_only_in
from tensorferry.server.onnx_graph.sizes import Size
from tensorferry.server.onnx_graph.values import RowProblems, Value


@operator(
    "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    accepts_problems=True,
)
@operator("Sampling", MICROSOFT, accepts_problems=True, shape_from_values=True)
def random(node: Node) -> Value:
    """Draw numbers. A seed fixes only the order in which a session draws them."""
    return _random(node, _shape(node), "is random, also with a seed: a row gets other numbers in each run")


def _random(node: Node, shape: tuple[Size, ...] | None, why: str) -> Value:
    """Return random numbers. Their shape is not random."""
    return Value(shape, problems=RowProblems(mixes=(f"{node.label} {why}",)))


def _shape(node: Node) -> tuple[Size, ...] | None:
    if node.operator in ("RandomNormal", "RandomUniform"):
        return tuple(node.attribute("shape", ()))
    if node.operator in ("Bernoulli", "RandomNormalLike", "RandomUniformLike"):
        return node.input(0).shape
    return None


@operator("Dropout", accepts_problems=True)
def dropout(node: Node) -> list[Value]:
    """Set random elements to zero in training mode; identity otherwise."""
    value = node.input(0)
    if not _sets_to_zero(node):
        if value.problems is not None:
            return [value, value]
        require_rows_only_in(node, 0)
        return [broadcast([value])] * 2
    training = node.input(2)
    if training.content is None:
        why = f"{node.label} may be in training mode, where it is random"
        return [Value(value.shape, problems=RowProblems(unknown=(why,)))] * 2
    return [_random(node, value.shape, "is in training mode, where it is random")] * 2


def _sets_to_zero(node: Node) -> bool:
    """Return whether the node is, or may be, in training mode with a ratio other than 0."""
    if not node.has(2):
        return False
    contents = [node.input(at).content if node.has(at) else None for at in (1, 2)]
    return all(content is None or any(content.flat) for content in contents)
