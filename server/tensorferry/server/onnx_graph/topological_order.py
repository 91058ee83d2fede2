"""The order of nodes: each after those whose outputs it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

import onnx


def topological_order(
    nodes: Iterable[onnx.NodeProto], captured_names: Callable[[onnx.NodeProto], Iterable[str]]
) -> Sequence[onnx.NodeProto]:
    """The nodes of a graph, sorted; as they are where that cannot be.

    The format wants them sorted. ONNX Runtime takes others as well, and its converter to FP16 makes such.
    `captured_names` has the names that a node's subgraphs take from the graph around them.
    """
    listed = list(nodes)
    makers = {name: place for place, node in enumerate(listed) for name in node.output if name}
    needs = {
        place: {makers[name] for name in (*node.input, *captured_names(node)) if name in makers}
        for place, node in enumerate(listed)
    }
    if all(need < place for place, needed in needs.items() for need in needed):
        return listed
    try:
        return [listed[place] for place in TopologicalSorter(needs).static_order()]
    except CycleError:
        return listed
