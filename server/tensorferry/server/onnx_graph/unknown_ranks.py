"""Inputs and outputs of unknown rank, which ONNX Runtime's API does not report."""

from __future__ import annotations

from pathlib import Path

from tensorferry.server.onnx_graph.model_file import UnreadableModel, read_model


def tensors_of_unknown_rank(path: Path) -> frozenset[str]:
    """Return the names of inputs and outputs declared without a shape; empty for a file that cannot be read."""
    try:
        graph = read_model(path).graph
    except UnreadableModel:
        return frozenset()
    return frozenset(
        value.name
        for value in (*graph.input, *graph.output)
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
    )
