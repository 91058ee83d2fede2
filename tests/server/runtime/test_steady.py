"""Distinction of models whose run time depends only on shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from onnx import parser, save
from support.models import small
from support.processes import models
from support.server.rig import Load

from tensorferry.server.onnx.graph import value_dependent_nodes
from tensorferry.server.onnx.loading import loading

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
    return not value_dependent_nodes(folder / "m.onnx")


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


def test_other_formats_are_not_steady(tmp_path: Path) -> None:
    for name, content in (("m.ort", b"ORTM"), ("m.onnx", b"")):
        (tmp_path / name).write_bytes(content)
        assert value_dependent_nodes(tmp_path / name)


@pytest.mark.parametrize(("build", "looks"), [(small.twice, 1), (models.probe, 2)])
def test_a_later_load_looks_again_only_if_it_was_not_steady(
    build: Callable[[Path], Path], looks: int, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[Path] = []

    def looked_at(path: Path) -> Sequence[str]:
        paths.append(path)
        return value_dependent_nodes(path)

    monkeypatch.setattr(loading, "value_dependent_nodes", looked_at)
    load(build)
    load(build)
    assert len(paths) == looks
