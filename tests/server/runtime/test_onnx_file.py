"""Strings in an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tensorferry.server.runtime.files.onnx_file import string_lists


def strings(name: str, *words: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(words, dtype=object), name)


def saved(path: Path, *nodes: onnx.NodeProto, tensors: Any = (), functions: Any = ()) -> Path:
    graph = helper.make_graph(nodes, "g", [], [], tensors)
    onnx.save(helper.make_model(graph, functions=functions), str(path))
    return path


def test_strings_in_attributes_tensors_subgraphs_and_functions_are_found(tmp_path: Path) -> None:
    inner = helper.make_graph([helper.make_node("Some", [], ["z"], within=["inner"])], "inner", [], [])
    hidden = helper.make_node("Some", [], ["y"], words=["hidden"])
    path = saved(
        tmp_path / "m.onnx",
        helper.make_node("Some", [], ["y"], listed=["a", "", "zwölf"], single="one", number=3, floats=[1.5]),
        helper.make_node("Constant", [], ["c"], value=strings("c", "constant")),
        helper.make_node("If", ["y"], ["i"], then_branch=inner),
        tensors=(
            numpy_helper.from_array(np.arange(1000, dtype=np.float32), "weights"),
            strings("table", "first", "second"),
        ),
        functions=[helper.make_function("own", "F", [], ["y"], [hidden], [])],
    )
    assert set(string_lists(path)) == {
        ("a", "", "zwölf"),
        ("one",),
        ("constant",),
        ("inner",),
        ("first", "second"),
        ("hidden",),
    }


def test_the_number_and_length_of_strings_is_bounded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Some", [], ["y"], words=[f"{at} {word}" for word in range(100)]) for at in range(20)
    ]
    found = string_lists(saved(tmp_path / "m.onnx", *nodes))
    assert [len(words) for words in found] == [64] * 16
    long = saved(tmp_path / "long.onnx", helper.make_node("Some", [], ["y"], words=["x" * 257, "y" * 256]))
    assert list(string_lists(long)) == [("y" * 256,)]


def test_a_file_that_is_no_model_has_none(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\xff" * 100)
    assert string_lists(tmp_path / "m.onnx") == ()
