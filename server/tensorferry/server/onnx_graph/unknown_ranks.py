"""What an ONNX file says of its inputs and outputs that ONNX Runtime does not tell."""

from __future__ import annotations

from pathlib import Path

from tensorferry.server.onnx_graph.model_file import UnreadableModel, read_model


def tensors_of_unknown_rank(path: Path) -> frozenset[str]:
    """The inputs and outputs whose type has no shape: they may have any rank. None of a file that cannot be read."""
    try:
        graph = read_model(path).graph
    except UnreadableModel:
        return frozenset()
    return frozenset(
        value.name
        for value in (*graph.input, *graph.output)
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
    )
