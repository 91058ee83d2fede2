"""Sequences of the parts of the batch axis. Other sequences are not analysed."""

from __future__ import annotations

from tensorferry.server.onnx.graph.operators import NOT_ANALYSED, Node, operator
from tensorferry.server.onnx.graph.sizes import Size
from tensorferry.server.onnx.graph.values import MixesRows, RowProblems, UnknownEffect, Value, merged_problems


@operator("SplitToSequence", shape_inputs=(1,), shape_from_values=True)
def split_to_sequence(node: Node) -> Value:
    """Split an axis into parts of given lengths, or of length 1."""
    value, sizes, axis = node.input(0), node.shape(0), node.axis(0)
    lengths = node.sizes("split", 1)
    # Parts whose lengths depend on the number of rows may be copies of all rows.
    fixed = lengths is None or all(isinstance(length, int) for length in lengths)
    if value.rows is None or value.rows.axis != axis or not fixed:
        raise UnknownEffect(NOT_ANALYSED)
    dropped = lengths is None and not node.attribute("keepdims", 1)
    middle: tuple[Size, ...] = () if dropped else (1 if lengths is None else node.fresh(),)
    why = f"{node.label} splits the batch axis into a sequence"
    return Value(
        (*sizes[:axis], *middle, *sizes[axis + 1 :]), problems=RowProblems(unknown=(why,)), row_parts=True
    )


@operator("SequenceAt SequenceErase", shape_from_values=True, accepts_problems=True)
def part_of_sequence(node: Node) -> Value:
    """Take one element, or leave it out."""
    sequence = node.input(0)
    index = node.input(1) if node.has(1) else Value(())
    if not sequence.row_parts or index.problems is not None:
        return _not_analysed(node)
    if not index.iterations:
        how = "takes" if node.operator == "SequenceAt" else "leaves out"
        raise MixesRows(f"{how} a part of the batch axis")
    if node.operator == "SequenceErase":
        return _not_analysed(node)
    return Value(sequence.shape, picked=index.iterations)


@operator("SequenceLength", accepts_problems=True)
def length_of_sequence(node: Node) -> Value:
    """Count the elements."""
    return Value((), depends_on_row_count=True) if node.input(0).row_parts else _not_analysed(node)


def _not_analysed(node: Node) -> Value:
    problems = merged_problems(value.problems for value in node.given)
    if problems is not None:
        return Value(problems=problems)
    raise UnknownEffect(NOT_ANALYSED)
