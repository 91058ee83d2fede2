"""The operators in the tables of rules: the verdict on each agrees with runs of a small model in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.onnx.graph.build import analysed, rows_stay_apart

from tensorferry.server.onnx.graph import RowMixing


def _floats(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


def _bytes(*shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(3).integers(0, 9, shape).astype(np.uint8)


CONSTANTS = {
    "zero": np.int64(0),
    "two": np.int64(2),
    "sixteen": np.int64(16),
    "ones": np.ones(4, np.float32),
    "scale": np.float32(0.1),
    "point": np.uint8(128),
    "matrix": _floats(3, 3),
    "weights": _floats(3, 2),
    "byte_weights": _bytes(3, 2),
    "bias": _floats(2),
    "kernel": _floats(2, 4, 3, 3),
    "turned_kernel": _floats(4, 2, 3, 3),
    "byte_kernel": _bytes(2, 4, 3, 3),
    "frame": np.int64(4),
    "window": _floats(8),
    "shape": np.array([3, 3, 3, 3]),
}

_Q = "q = QuantizeLinear (x, scale, point) "
_BACK = " y = DequantizeLinear (b, scale, point)"
_TURN = "t = Transpose <perm = [1, 0]> (x) "
_ROWS_LAST = "t = Transpose <perm = [1, 2, 3, 0]> (x) "
_ROWS_FIRST = " y = Transpose <perm = [3, 0, 1, 2]> (b)"

# The shape of a row, and a graph that keeps rows apart.
APART: dict[str, tuple[tuple[int, ...], str]] = {
    "CumSum": ((3, 4), "y = CumSum (x, two)"),
    "LpNormalization": ((3, 4), "y = LpNormalization (x)"),
    "MeanVarianceNormalization": ((2, 3, 3), "y = MeanVarianceNormalization <axes = [2, 3]> (x)"),
    "Trilu": ((3, 3), "y = Trilu (x, zero)"),
    "Det": ((3, 3), "y = Det (x)"),
    "Inverse": ((3, 3), "e = EyeLike <dtype = 1> (matrix) a = Add (x, e) y = com.microsoft.Inverse (a)"),
    "InstanceNormalization": ((4, 3), "y = InstanceNormalization (x, ones, ones)"),
    "GroupNormalization": ((4, 3), "y = GroupNormalization <num_groups = 2> (x, ones, ones)"),
    "LRN": ((4, 2, 2), "y = LRN <size = 3> (x)"),
    "GlobalAveragePool": ((4, 3), "y = GlobalAveragePool (x)"),
    "GlobalMaxPool": ((4, 3), "y = GlobalMaxPool (x)"),
    "GlobalLpPool": ((4, 3), "y = GlobalLpPool (x)"),
    "DepthToSpace": ((4, 2, 2), "y = DepthToSpace <blocksize = 2> (x)"),
    "SpaceToDepth": ((1, 4, 4), "y = SpaceToDepth <blocksize = 2> (x)"),
    "STFT": ((16, 1), "y = STFT (x, frame, window)"),
    "LinearRegressor": ((3,), "y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0, 3.0]> (x)"),
    "LinearClassifier": ((2,), "l, y = ai.onnx.ml.LinearClassifier <coefficients = [1.0, 2.0, 3.0, 4.0], intercepts = [0.0, 1.0], classlabels_ints = [0, 1]> (x)"),
    "Scaler": ((3,), "y = ai.onnx.ml.Scaler <offset = [1.0], scale = [2.0]> (x)"),
    "Imputer": ((3,), "y = ai.onnx.ml.Imputer <imputed_value_floats = [1.0], replaced_value_float = 0.0> (x)"),
    "Normalizer": ((3,), 'y = ai.onnx.ml.Normalizer <norm = "L2"> (x)'),
    "HannWindow": ((16,), "w = HannWindow (sixteen) y = Mul (x, w)"),
    "MatMul": ((3,), "y = MatMul (x, weights)"),
    "MatMulInteger": ((3,), _Q + "i = MatMulInteger (q, byte_weights) y = Cast <to = 1> (i)"),
    "MatMulIntegerToFloat": ((3,), _Q + "y = com.microsoft.MatMulIntegerToFloat (q, byte_weights, scale, scale, point, point)"),
    "FusedMatMul": ((3, 3), "y = com.microsoft.FusedMatMul <transA = 1> (x, x)"),
    "QLinearMatMul": ((3,), _Q + "b = QLinearMatMul (q, scale, point, byte_weights, scale, point, scale, point)" + _BACK),
    "Gemm": ((3,), "y = Gemm (x, weights, bias)"),
    "FusedGemm": ((3,), 'y = com.microsoft.FusedGemm <activation = "Relu"> (x, weights, bias)'),
    "Conv": ((4, 5, 5), "y = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, kernel)"),
    "ConvTranspose": ((4, 3, 3), "y = ConvTranspose (x, turned_kernel)"),
    "ConvInteger": ((4, 3, 3), _Q + "i = ConvInteger (q, byte_kernel) y = Cast <to = 1> (i)"),
    "QLinearConv": ((4, 3, 3), _Q + "b = QLinearConv (q, scale, point, byte_kernel, scale, point, scale, point)" + _BACK),
    "FusedConv": ((4, 3, 3), 'y = com.microsoft.FusedConv <activation = "Relu"> (x, kernel)'),
    "MaxPool": ((4, 5, 5), "y = MaxPool <kernel_shape = [2, 2], ceil_mode = 1, strides = [2, 2]> (x)"),
    "QLinearAveragePool": ((4, 3, 3), _Q + "b = com.microsoft.QLinearAveragePool <kernel_shape = [2, 2]> (q, scale, point, scale, point)" + _BACK),
    "QLinearSigmoid": ((3,), _Q + "b = com.microsoft.QLinearSigmoid (q, scale, point, scale, point)" + _BACK),
    "QLinearAdd": ((3,), _Q + "b = com.microsoft.QLinearAdd (q, scale, point, q, scale, point, scale, point)" + _BACK),
    "Binarizer": ((3,), "y = ai.onnx.ml.Binarizer <threshold = 0.5> (x)"),
    "CastLike": ((3,), "y = CastLike (x, scale)"),
}  # fmt: skip

# The same for graphs in which the operator mixes rows.
MIXED: dict[str, tuple[tuple[int, ...], str]] = {
    "CumSum": ((3, 4), "y = CumSum (x, zero)"),
    "LpNormalization": ((3, 4), "y = LpNormalization <axis = 0> (x)"),
    "MeanVarianceNormalization": ((2, 3, 3), "y = MeanVarianceNormalization (x)"),
    "Trilu": ((3,), "y = Trilu (x, zero)"),
    "LRN": ((4, 2, 2), "t = Transpose <perm = [1, 0, 2, 3]> (x) b = LRN <size = 3> (t) y = Transpose <perm = [1, 0, 2, 3]> (b)"),
    "GlobalMaxPool": ((4, 2, 2), _ROWS_LAST + "m = GlobalMaxPool (t) b = Sub (t, m)" + _ROWS_FIRST),
    "MatMul": ((3,), _TURN + "s = MatMul (t, x) y = MatMul (x, s)"),
    "FusedMatMul": ((3,), "s = com.microsoft.FusedMatMul <transA = 1> (x, x) y = MatMul (x, s)"),
    "Gemm": ((3,), "s = Gemm <transA = 1> (x, x) y = MatMul (x, s)"),
    "Conv": ((4, 3, 3), _ROWS_LAST.replace("1, 2, 3, 0", "1, 2, 0, 3") + "w = ConstantOfShape <value = float[1] {1.0}> (shape) c = Conv <pads = [1, 1, 1, 1]> (t, w) b = Add (t, c) y = Transpose <perm = [2, 0, 1, 3]> (b)"),
    "MaxPool": ((4, 2, 2), _ROWS_LAST + "b = MaxPool <kernel_shape = [1, 3], pads = [0, 1, 0, 1]> (t)" + _ROWS_FIRST),
    "DynamicQuantizeLinear": ((3,), "q, s, z = DynamicQuantizeLinear (x) y = DequantizeLinear (q, s, z)"),
    "DynamicQuantizeMatMul": ((3,), "y = com.microsoft.DynamicQuantizeMatMul (x, byte_weights, scale, point)"),
}  # fmt: skip


def _case(row: tuple[int, ...], body: str) -> str:
    return f"g (float[N, {', '.join(map(str, row))}] x) => (float[N] y) {{ {body} }}"


@pytest.mark.parametrize("operator", APART)
def test_rows_that_are_proved_stay_apart(operator: str, tmp_path: Path) -> None:
    row, body = APART[operator]
    found = analysed(tmp_path, _case(row, body), constants=CONSTANTS)
    assert found.finding is RowMixing.SEPARATE, found.reasons
    assert rows_stay_apart(tmp_path / "m.onnx", *row)


@pytest.mark.parametrize("operator", MIXED)
def test_rows_that_mix_are_refused(operator: str, tmp_path: Path) -> None:
    row, body = MIXED[operator]
    found = analysed(tmp_path, _case(row, body), constants=CONSTANTS)
    assert found.finding is RowMixing.MIXES, found.reasons
    assert operator in found.reasons[0]
    assert not rows_stay_apart(tmp_path / "m.onnx", *row)
