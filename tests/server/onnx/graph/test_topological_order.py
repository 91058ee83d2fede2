"""The analysis sorts nodes that precede their inputs' producers, as ONNX Runtime's FP16 converter leaves them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from server.onnx.graph.build import model
from support.models import small

from tensorferry.server.onnx.graph import RowMixing, analyse_batching
from tensorferry.server.runtime.files.fp16 import convert_to_fp16
from tensorferry.server.runtime.ort_options import Fp16

CAPTURING = """
g (float[N, 4] x, bool c) => (float[N, 4] y) {
    later = Relu(x)
    y = If(c) <then_branch = a () => (float[N, 4] p) { p = Neg(later) },
               else_branch = b () => (float[N, 4] q) { q = Abs(later) }>
}"""


@pytest.mark.parametrize(
    "text",
    ["g (float[N, 4] x) => (float[N, 4] y) { a = Relu(x) \n b = Neg(a) \n y = Add(a, b) }", CAPTURING],
    ids=["inputs", "taken by a subgraph"],
)
def test_nodes_in_the_opposite_order_are_sorted(text: str, tmp_path: Path) -> None:
    made = model(text)
    nodes = list(made.graph.node)[::-1]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    onnx.save(made, tmp_path / "m.onnx")
    assert analyse_batching(tmp_path / "m.onnx", ["x"]).finding is RowMixing.SEPARATE


def test_a_cycle_of_nodes_is_unknown(tmp_path: Path) -> None:
    made = model("g (float[N, 4] x) => (float[N, 4] y) { a = Add(x, b) \n b = Relu(a) \n y = Neg(b) }")
    onnx.save(made, tmp_path / "m.onnx")
    assert analyse_batching(tmp_path / "m.onnx", ["x"]).finding is RowMixing.UNKNOWN


def test_a_model_converted_to_fp16_is_analysed(tmp_path: Path) -> None:
    converted = convert_to_fp16(small.conv(tmp_path / "m.onnx"), Fp16(0.02), tmp_path)
    assert converted is not None
    assert analyse_batching(converted, ["image"]).finding is RowMixing.SEPARATE
