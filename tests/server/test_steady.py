"""Models whose time may depend on values are told from those whose time depends on shapes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e import models
from onnx import TensorProto, helper, save

from tensorferry.server.steady import is_steady


def test_dense_layers_are_steady(digits_model: Path, echo_model: Path) -> None:
    assert is_steady(digits_model)
    assert is_steady(echo_model)


def test_a_loop_is_not(tmp_path: Path) -> None:
    assert not is_steady(models.probe(tmp_path / "probe.onnx"))


@pytest.mark.parametrize("operator", ["NonZero", "Range", "Tile", "If", "Unique"])
def test_shapes_made_from_values_are_not(tmp_path: Path, operator: str) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "g", [value], [value])
    save(helper.make_model(graph), tmp_path / "m.onnx")
    assert not is_steady(tmp_path / "m.onnx")


def test_names_that_only_look_alike_do_not_count(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("Loop", TensorProto.FLOAT, ["Range"])
    graph = helper.make_graph([helper.make_node("Identity", ["Loop"], ["Tile"])], "If", [value], [value])
    save(helper.make_model(graph), tmp_path / "m.onnx")
    assert is_steady(tmp_path / "m.onnx")


def test_another_format_cannot_be_told(tmp_path: Path) -> None:
    (tmp_path / "m.ort").write_bytes(b"ORTM")
    (tmp_path / "m.onnx").write_bytes(b"")
    assert not is_steady(tmp_path / "m.ort")
    assert not is_steady(tmp_path / "m.onnx")
