"""Strings in an ONNX file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from support.models import small

from tensorferry.server.runtime.files.onnx_file import string_lists


def strings(name: str, *words: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(words, dtype=object), name)


def saved(path: Path, *nodes: onnx.NodeProto, tensors: tuple[onnx.TensorProto, ...] = ()) -> Path:
    graph = helper.make_graph(nodes, "g", [], [], tensors)
    onnx.save(helper.make_model(graph), str(path))
    return path


def test_strings_in_attributes_tensors_and_subgraphs_are_found(tmp_path: Path) -> None:
    inner = helper.make_graph([helper.make_node("Some", [], ["z"], within=["inner"])], "inner", [], [])
    path = saved(
        tmp_path / "m.onnx",
        helper.make_node("Some", [], ["y"], listed=["a", "", "zwölf"], single="one", number=3, floats=[1.5]),
        helper.make_node("Constant", [], ["c"], value=strings("c", "constant")),
        helper.make_node("If", ["y"], ["i"], then_branch=inner),
        tensors=(
            numpy_helper.from_array(np.arange(1000, dtype=np.float32), "weights"),
            strings("table", "first", "second"),
        ),
    )
    assert set(string_lists(path)) == {
        ("a", "", "zwölf"),
        ("one",),
        ("constant",),
        ("inner",),
        ("first", "second"),
    }


def test_strings_in_functions_are_found(tmp_path: Path) -> None:
    function = helper.make_function(
        "own", "F", [], ["y"], [helper.make_node("Some", [], ["y"], words=["hidden"])], []
    )
    graph = helper.make_graph([], "g", [], [])
    onnx.save(helper.make_model(graph, functions=[function]), str(tmp_path / "m.onnx"))
    assert list(string_lists(tmp_path / "m.onnx")) == [("hidden",)]


def test_the_number_and_length_of_strings_is_bounded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Some", [], ["y"], words=[f"{at} {word}" for word in range(100)]) for at in range(20)
    ]
    found = string_lists(saved(tmp_path / "m.onnx", *nodes))
    assert [len(words) for words in found] == [64] * 16
    long = saved(tmp_path / "long.onnx", helper.make_node("Some", [], ["y"], words=["x" * 257, "y" * 256]))
    assert list(string_lists(long)) == [("y" * 256,)]


def test_truncated_or_invalid_files_raise_nothing(tmp_path: Path) -> None:
    path = small.without_stop_words(tmp_path / "m.onnx")
    data = path.read_bytes()
    whole = set(string_lists(path))
    assert ("the", "a") in whole
    for content in (*(data[:cut] for cut in range(len(data))), b"\xff" * 100, b"\x0b" + data):
        (tmp_path / "cut.onnx").write_bytes(content)
        assert set(string_lists(tmp_path / "cut.onnx")) <= whole
