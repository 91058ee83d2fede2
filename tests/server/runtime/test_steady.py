"""Distinction of models whose run time depends only on shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import TensorProto, helper, parser, save
from support.models import small
from support.processes import models
from support.server.rig import Load

from tensorferry.server.onnx.loading import loading
from tensorferry.server.runtime.files.onnx_file import has_steady_run_time


def test_dense_layers_have_a_steady_run_time(digits_model: Path, echo_model: Path) -> None:
    assert has_steady_run_time(digits_model)
    assert has_steady_run_time(echo_model)


def test_a_loop_has_no_steady_run_time(tmp_path: Path) -> None:
    assert not has_steady_run_time(models.probe(tmp_path / "probe.onnx"))


# In each operator `n` determines a size. It is an input of the model, or a constant.
SIZED = {
    "Range": "zero = Constant <value_int = 0> () one = Constant <value_int = 1> () y = Range(zero, n, one)",
    "Tile": "k = Unsqueeze(n, axis) y = Tile(x, k)",
    "ConstantOfShape": "k = Unsqueeze(n, axis) y = ConstantOfShape(k)",
    "Expand": "k = Unsqueeze(n, axis) y = Expand(axis, k)",
    "OneHot": "i = Cast <to = 7> (x) y = OneHot(i, n, x)",
    "TopK": "k = Unsqueeze(n, axis) y, i = TopK(x, k)",
    "Pad": "k = Unsqueeze(n, axis) ends = Concat <axis = 0> (axis, k) y = Pad(x, ends)",
    "Resize": "k = Unsqueeze(n, axis) y = Resize(x, , , k)",
    "Slice": "k = Unsqueeze(n, axis) y = Slice(x, axis, k)",
    "Reshape": "k = Unsqueeze(n, axis) one = Constant <value_ints = [1]> () s = Concat <axis = 0> (k, one) y = Reshape(x, s)",
    "HannWindow": "y = HannWindow(n)",
    "HammingWindow": "y = HammingWindow(n)",
    "BlackmanWindow": "y = BlackmanWindow(n)",
    "MelWeightMatrix": "h = Constant <value_float = 1.0> () y = MelWeightMatrix(n, n, n, h, h)",
    "AffineGrid": "k = Unsqueeze(n, axis) s = Concat <axis = 0> (k, k, k, k) y = AffineGrid(x, s)",
    "Col2Im": "k = Unsqueeze(n, axis) s = Concat <axis = 0> (k, k) y = Col2Im(x, s, s)",
    "CenterCropPad": "k = Unsqueeze(n, axis) y = CenterCropPad(x, k)",
    "DFT": "y = DFT(x, n)",
    "Split": "k = Unsqueeze(n, axis) s = Concat <axis = 0> (k, k) y, z = Split(x, s)",
    "If": "one = Constant <value_int = 1> () c = Greater(n, one) y = If <then_branch = t () => (y) "
    "{ y = Relu(x) }, else_branch = e () => (y) { y = MatMul(x, x) }> (c)",
    "Loop": "y = Loop <body = b (i, c, a) => (c, z) { z = Relu(a) }> (n, , x)",
    "MaxUnpool": "i = Cast <to = 7> (x) k = Unsqueeze(n, axis) y = MaxUnpool <kernel_shape = [1]> (x, i, k)",
    "of a function": "y = local.Function(n)",
}
_FUNCTION = '<domain: "local", opset_import: ["" : 20]> Function (n) => (y) { y = HannWindow(n) }'


def _has_steady_run_time(folder: Path, inputs: str, body: str) -> bool:
    header = '<ir_version: 9, opset_import: ["" : 20, "local" : 1]>'
    body = "axis = Constant <value_ints = [0]> () " + body
    text = f"{header} g ({inputs}) => (float[N] y) {{ {body} }} {_FUNCTION}"
    save(parser.parse_model(text), folder / "m.onnx")
    return has_steady_run_time(folder / "m.onnx")


@pytest.mark.parametrize("operator", SIZED)
def test_sizes_from_values_are_not_steady_and_from_constants_and_shapes_are(
    tmp_path: Path, operator: str
) -> None:
    body = SIZED[operator]
    assert not _has_steady_run_time(tmp_path, "float[N] x, int64 n", body)
    assert _has_steady_run_time(tmp_path, "float[N] x", "n = Constant <value_int = 4> () " + body)
    assert _has_steady_run_time(tmp_path, "float[N] x", "n = Size(x) " + body)


@pytest.mark.parametrize(
    "body",
    [
        "y = NonZero(x)",
        "y = Unique(x)",
        "c = Cast <to = 9> (x) y = Compress(x, c)",
        "y = NonMaxSuppression(x, x)",
        "y = Acme(x)",
    ],
)
def test_counts_of_values_and_unknown_operators_are_not_steady(tmp_path: Path, body: str) -> None:
    assert not _has_steady_run_time(tmp_path, "float[N] x", body)


def test_names_that_contain_operator_names_are_ignored(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("Loop", TensorProto.FLOAT, ["Range"])
    graph = helper.make_graph([helper.make_node("Identity", ["Loop"], ["Tile"])], "If", [value], [value])
    save(helper.make_model(graph), tmp_path / "m.onnx")
    assert has_steady_run_time(tmp_path / "m.onnx")


def test_other_formats_are_not_steady(tmp_path: Path) -> None:
    (tmp_path / "m.ort").write_bytes(b"ORTM")
    (tmp_path / "m.onnx").write_bytes(b"")
    assert not has_steady_run_time(tmp_path / "m.ort")
    assert not has_steady_run_time(tmp_path / "m.onnx")


@pytest.mark.parametrize(("build", "looks"), [(small.twice, 1), (models.probe, 2)])
def test_a_later_load_looks_again_only_if_it_was_not_steady(
    build: Callable[[Path], Path], looks: int, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[Path] = []

    def looked_at(path: Path) -> bool:
        paths.append(path)
        return has_steady_run_time(path)

    monkeypatch.setattr(loading, "has_steady_run_time", looked_at)
    load(build)
    load(build)
    assert len(paths) == looks
