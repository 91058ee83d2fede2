"""Topological order of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

import onnx


def topological_order(
    nodes: Iterable[onnx.NodeProto], captured_names: Callable[[onnx.NodeProto], Iterable[str]]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes in topological order; in the given order if the graph has a cycle.

    The format requires sorted nodes, but ONNX Runtime accepts any order and its FP16 converter produces unsorted ones.
    `captured_names` returns the names that a node's subgraphs use from the graph around them.
    """
    listed = list(nodes)
    producers = {name: index for index, node in enumerate(listed) for name in node.output if name}
    needs = {
        index: {producers[name] for name in (*node.input, *captured_names(node)) if name in producers}
        for index, node in enumerate(listed)
    }
    if all(need < index for index, needed in needs.items() for need in needed):
        return listed
    try:
        return [listed[index] for index in TopologicalSorter(needs).static_order()]
    except CycleError:
        return listed
