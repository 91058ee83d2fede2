"""Small ONNX models in text syntax, for the tests of the graph analysis."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
from onnx import parser

from tensorferry.server.onnx_graph import BatchAnalysis, analyse_batching


def model(text: str, opset: int = 21) -> onnx.ModelProto:
    """Return the model of a graph in ONNX's text syntax."""
    opsets = ", ".join(
        [f'"" : {opset}', '"local" : 1', '"com.microsoft" : 1', '"ai.onnx.ml" : 3', '"com.acme" : 1']
    )
    made: onnx.ModelProto = parser.parse_model(f"<ir_version: 8, opset_import: [{opsets}]>\n{text}")
    return made


def analysed(folder: Path, text: str, batched: Collection[str] = ("x",), opset: int = 21) -> BatchAnalysis:
    """Return the analysis of a graph in ONNX's text syntax."""
    path = folder / "m.onnx"
    onnx.save(model(text, opset), path)
    return analyse_batching(path, batched)
