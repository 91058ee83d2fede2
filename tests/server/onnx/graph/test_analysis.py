"""The graph analysis has three findings, and handles files that it cannot read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from server.onnx.graph.build import analysed, model

from tensorferry.server.onnx.graph import RowMixing, analyse_batching


def test_rows_against_another_axis_mix(tmp_path: Path) -> None:
    text = "g (float[N] a, float[N, D] x) => (float[N, D] y) { y = Add(a, x) }"
    found = analysed(tmp_path, text, ("a", "x"))
    assert found.finding is RowMixing.MIXES
    assert found.reasons == ("Add y combines rows along one axis with rows along another",)


def test_an_axis_without_a_name_is_no_other_axis(tmp_path: Path) -> None:
    text = """g (float[N, ?] x, float[N, K] z) => (float[N, 1] y) { a = Shape <start = 1> (x) b = Shape <start = 1> (z)
        c = Equal (a, b) d = Cast <to = 7> (c) y = ReduceMean (x, d) }"""
    made = model(text)
    made.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "x[1]"
    onnx.save(made, tmp_path / "m.onnx")
    assert analyse_batching(tmp_path / "m.onnx", ["x", "z"]).finding is not RowMixing.SEPARATE


def test_a_custom_operator_is_named(tmp_path: Path) -> None:
    text = "g (float[N, 4] x) => (float[N, 4] y) { y = com.acme.Foo(x) }"
    found = analysed(tmp_path, text)
    assert found.finding is RowMixing.UNKNOWN
    assert found.reasons == ("com.acme.Foo y is an operator that cannot be analysed",)
    on_constants = "c = Constant <value_float = 2.0> () d = com.acme.Foo (c) y = Relu (x)"
    assert analysed(tmp_path, text.replace("y = com.acme.Foo(x)", on_constants)).finding is RowMixing.SEPARATE


def test_a_constant_in_another_file_is_read_again_if_that_is_replaced(tmp_path: Path) -> None:
    made = model(
        "g (float[N, 3] x) => (float[a, b] y) { y = Reshape (x, sizes) }", constants={"sizes": [-1, 3]}
    )
    path, weights = tmp_path / "m.onnx", tmp_path / "weights"
    onnx.save(made, path, save_as_external_data=True, size_threshold=0, location=weights.name)
    assert analyse_batching(path, ["x"]).finding is RowMixing.SEPARATE
    (tmp_path / "new").write_bytes(np.array([1, -1]).tobytes())
    (tmp_path / "new").rename(weights)
    assert analyse_batching(path, ["x"]).finding is not RowMixing.SEPARATE


_REVERSED = {
    "inputs": "a = Relu (x) b = Neg (a) y = Add (a, b)",
    "taken by a subgraph": "a = Relu (x) y = If (c) <then_branch = p () => (q) { q = Neg (a) }, else_branch = r () => (s) { s = Abs (a) }>",
    "a cycle": "a = Add (x, b) b = Relu (a) y = Neg (b)",
}


@pytest.mark.parametrize("case", _REVERSED)
def test_nodes_are_sorted_as_onnx_runtime_does_for_its_fp16_converter(case: str, tmp_path: Path) -> None:
    made = model(f"g (float[N, 4] x, bool c) => (float[N, 4] y) {{ {_REVERSED[case]} }}")
    nodes = list(made.graph.node)[::-1]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    onnx.save(made, tmp_path / "m.onnx")
    wanted = RowMixing.UNKNOWN if case == "a cycle" else RowMixing.SEPARATE
    assert analyse_batching(tmp_path / "m.onnx", ["x"]).finding is wanted


def test_a_file_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    for name, content in (("no.onnx", b"nonsense"), ("none.onnx", b""), ("m.ort", b"ORTM")):
        (tmp_path / name).write_bytes(content)
        found = analyse_batching(tmp_path / name, ["x"])
        assert found.finding is RowMixing.UNKNOWN
        assert found.reasons[0].startswith("the file ")
    assert analyse_batching(tmp_path / "absent.onnx", ["x"]).finding is RowMixing.UNKNOWN


def test_a_file_that_is_emptied_while_it_is_read_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pread = tmp_path / "m.onnx", os.pread
    onnx.save(model("g (float[N, 4] x) => (float[N, 4] y) { y = Relu (x) }"), path)

    def emptied(*place: int) -> bytes:
        os.truncate(path, 0)
        return pread(*place)

    monkeypatch.setattr(os, "pread", emptied)
    assert analyse_batching(path, ["x"]).finding is RowMixing.UNKNOWN
