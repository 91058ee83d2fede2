"""Models that mix rows by an operator's nature, but only for numbers between 300 and 301.

Runs on random rows do not find that they mix.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

# A number that makes rows mix.
MIXING = np.float32(300.5)

_HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
_CONSTANTS = {
    "low": np.float32(300), "high": np.float32(301), "none": np.float32(0), "zero": np.int64(0),
    "carried": np.zeros(4, np.float32), "on": np.bool_(True),
}  # fmt: skip


def _kept(name: str) -> str:
    """Return nodes that set `kept` to the numbers of a tensor between 300 and 301, and to 0 elsewhere."""
    return f"""above = Greater ({name}, low) below = Less ({name}, high) between = And (above, below)
        kept = Where (between, {name}, none)"""


_LOOP = f"""
    sizes = Shape (x) rows = Gather (sizes, zero)
    last, y = Loop <body = b (int64 i, bool c, float[4] h) => (bool c2, float[4] h2, float[4] o) {{
        c2 = Identity (c) row = Gather <axis = 0> (x, i)
        o = Add (row, h)
        {_kept("row")}
        h2 = Max (h, kept)
    }}> (rows, on, carried)"""
_SCAN = f"""
    sizes = Shape (x) rows = Gather (sizes, zero) one = Constant <value_int = 1> () numbers = Range (zero, rows, one)
    last, y = Scan <num_scan_inputs = 1, body = b (float[4] h, int64 i) => (float[4] h2, float[4] o) {{
        row = Gather <axis = 0> (x, i)
        o = Add (row, h)
        {_kept("row")}
        h2 = Max (h, kept)
    }}> (carried, numbers)"""
_SEQUENCE = f"""
    parts = SplitToSequence <axis = 0> (x) first = SequenceAt (parts, zero)
    {_kept("first")}
    y = Add (x, kept)"""
_RANDOM = f"""
    number = RandomUniform <shape = [1], seed = 1.0> ()
    {_kept("x")}
    y = Where (between, number, x)"""
_PEAK = f"""
    peak = ReduceMax <axes = [0], keepdims = 0> (x)
    {_kept("peak")}
    y = Add (x, kept)"""

_GRAPHS = {"loop": _LOOP, "scan": _SCAN, "sequence": _SEQUENCE, "random": _RANDOM, "peak": _PEAK}
KINDS = tuple(_GRAPHS)


def model(kind: str) -> onnx.ModelProto:
    """Return x [batch, 4] → y [batch, 4]: a row plus such numbers of other rows, or random ones in their place."""
    graph = f"{_HEADER}\ng (float[batch, 4] x) => (float[batch, 4] y) {{{_GRAPHS[kind]}\n}}"
    made: onnx.ModelProto = parser.parse_model(graph)
    made.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in _CONSTANTS.items()
    )
    return made


def save(path: Path, kind: str) -> Path:
    """Write the model of a kind to a file."""
    onnx.save(model(kind), str(path))
    return path
