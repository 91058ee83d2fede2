"""Small ONNX models in text syntax, for the tests of the graph analysis."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper, parser

from tensorferry.server.onnx.graph import BatchAnalysis, analyse_batching


def model(text: str, opset: int = 21, constants: Mapping[str, Any] | None = None) -> onnx.ModelProto:
    """Return the model of a graph in ONNX's text syntax, with those constants that the text names."""
    opsets = ", ".join(
        [f'"" : {opset}', '"local" : 1', '"com.microsoft" : 1', '"ai.onnx.ml" : 3', '"com.acme" : 1']
    )
    made: onnx.ModelProto = parser.parse_model(f"<ir_version: 8, opset_import: [{opsets}]>\n{text}")
    for name, array in (constants or {}).items():
        if re.search(rf"\b{name}\b", text):
            made.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return made


def analysed(
    folder: Path,
    text: str,
    batched: Collection[str] = ("x",),
    opset: int = 21,
    constants: Mapping[str, Any] | None = None,
) -> BatchAnalysis:
    """Return the analysis of a graph in ONNX's text syntax; the model is in m.onnx."""
    path = folder / "m.onnx"
    onnx.save(model(text, opset, constants), path)
    return analyse_batching(path, batched)


def rows_stay_apart(path: Path, *row: int) -> bool:
    """Return whether ONNX Runtime gives five rows of that shape the same answers together as alone."""
    made = onnx.load(path)
    for output in made.graph.output:
        output.type.tensor_type.ClearField("shape")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    x = np.random.default_rng(1).standard_normal((5, *row)).astype(np.float32)
    alone = [session.run(["y"], {"x": x[at : at + 1]})[0] for at in range(5)]
    try:
        (together,) = session.run(["y"], {"x": x})
    except Exception:  # ONNX Runtime has no error types of its own
        return False
    apart = np.concatenate(alone) if np.ndim(alone[0]) else np.array(alone)
    return together.shape == apart.shape and len(together) == 5 and np.allclose(together, apart, 1e-4, 1e-5)
