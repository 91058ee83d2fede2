"""The classification extension: order, format and shape of the classes, and their labels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.models import small
from support.server.rig import (
    Array,
    fp32,
    reproducible,
    spec,
)

from tensorferry.batcher import Outcome
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.protos.tensors import DATATYPES, decode_raw
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import InvalidRequestError, StartError
from tensorferry.server.inference.requests.codec import ResponseSpec, encode_response
from tensorferry.server.inference.responses.classification import Classifier
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.repository.labels import read_labels

ROWS = Classifier(batched=True)
RANKED = ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP32", "FP64"]


def classes(array: Any, count: int, classifier: Classifier = ROWS) -> Any:
    return classifier.classes("y", np.asarray(array), count).tolist()


def test_the_example_of_the_protocol() -> None:
    scores = np.array([[1, 5, 10, 4]], np.int32)
    assert classes(scores, 2) == [[b"10:2", b"5:1"]]
    fruit = Classifier(batched=True, labels={"y": ("kiwi", "pickle", "apple", "plum")})
    assert classes(scores, 2, fruit) == [[b"10:2:apple", b"5:1:pickle"]]


def test_floats_have_six_decimals_and_integers_none() -> None:
    assert classes(np.array([[0.1, -2.0, 1e20, 1e-9]], np.float32), 4) == [
        [b"100000002004087734272.000000:2", b"0.100000:0", b"0.000000:3", b"-2.000000:1"]
    ]
    assert classes(np.array([[255, 0]], np.uint8), 2) == [[b"255:0", b"0:1"]]
    assert classes(np.array([[math.inf, -math.inf]]), 2) == [[b"inf:0", b"-inf:1"]]


def test_the_smallest_and_largest_integers_compare_exactly() -> None:
    low, high = -(1 << 63), (1 << 63) - 1
    assert classes(np.array([[low, 0, high]], np.int64), 3) == [
        [f"{high}:2".encode(), b"0:1", f"{low}:0".encode()]
    ]
    assert classes(np.array([[0, (1 << 64) - 1]], np.uint64), 1) == [[b"18446744073709551615:1"]]


def test_nan_is_lowest() -> None:
    row = np.array([[math.nan, 1.0, -math.inf, math.nan]])
    assert classes(row, 4) == [[b"1.000000:1", b"-inf:2", b"nan:0", b"nan:3"]]
    many = np.full((1, 100), math.nan)
    many[0, 50] = 1
    assert classes(many, 2) == [[b"1.000000:50", b"nan:0"]]


@st.composite
def outputs(draw: Any) -> tuple[Array, int]:
    storage = DATATYPES[draw(st.sampled_from(RANKED))].storage
    shape = draw(arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=40))
    # Few values, so that some are equal.
    values = st.integers(0, 5) if draw(st.booleans()) else None
    return draw(arrays.arrays(storage, shape, elements=values)), draw(st.integers(1, 50))


@given(outputs())
@reproducible
def test_classes_are_in_the_order_of_a_stable_sort(drawn: tuple[Array, int]) -> None:
    array, count = drawn
    found = ROWS.classes("y", array, count)
    width = math.prod(array.shape[1:])
    assert found.shape == (array.shape[0], min(count, width))
    for row, texts in zip(array.reshape(array.shape[0], width), found, strict=True):
        values = row.tolist()
        nan = [value != value for value in values]
        order = sorted(range(width), key=lambda at: (nan[at], 0 if nan[at] else -values[at], at))
        assert [int(text.split(b":")[1]) for text in texts] == order[:count]


def test_indices_count_through_a_row_of_several_dimensions() -> None:
    assert classes(np.arange(12).reshape(2, 2, 3), 1) == [[b"5:5"], [b"11:5"]]


def test_without_batching_the_output_is_one_row() -> None:
    assert classes(np.array([[1, 2], [4, 3]]), 2, Classifier()) == [b"4:2", b"3:3"]
    assert classes(np.array(7), 3, Classifier()) == [b"7:0"]
    assert classes(np.array([3, 4]), 1) == [[b"3:0"], [b"4:0"]]


def test_at_most_as_many_classes_as_elements() -> None:
    assert classes(np.array([[2, 1]]), 1 << 40) == [[b"2:0", b"1:1"]]
    assert ROWS.classes("y", np.zeros((0, 4)), 2).shape == (0, 2)
    assert ROWS.classes("y", np.zeros((3, 0)), 2).shape == (3, 0)


def test_a_row_too_large_to_rank_is_refused() -> None:
    assert ROWS.classes("y", np.zeros((2, 1_000_000), np.int8), 1).tolist() == [[b"0:0"], [b"0:0"]]
    with pytest.raises(
        InvalidRequestError, match="classification output tensor too large: a row of output 'y'"
    ):
        ROWS.classes("y", np.zeros((1, 1_000_001), np.int8), 1)


def test_a_class_without_a_label() -> None:
    labels = Classifier(batched=True, labels={"y": ("", "b"), "other": ("x",) * 3})
    assert classes(np.array([[3, 2, 1]]), 3, labels) == [[b"3:0", b"2:1:b", b"1:2"]]


@pytest.mark.parametrize("typed", [False, True])
def test_a_response_has_classes_beside_values(typed: bool) -> None:
    response_spec = ResponseSpec(
        (spec("y", "FP32", "batch", 3), spec("z", "INT64", "batch")),
        typed=typed,
        explain=False,
        class_counts=(2, 0),
    )
    outcome = Outcome({"y": fp32(2, 3), "z": np.array([7, 8])})
    response = encode_response("m", "1", response_spec, outcome, ROWS)
    y, z = response.outputs
    assert (y.name, y.datatype, list(y.shape)) == ("y", "BYTES", [2, 2])
    assert (z.datatype, list(z.shape)) == ("INT64", [2])
    expected = [b"2.000000:2", b"1.000000:1", b"5.000000:2", b"4.000000:1"]
    if typed:
        assert list(y.contents.bytes_contents) == expected
        assert list(z.contents.int64_contents) == [7, 8]
    else:
        assert decode_raw(response.raw_output_contents[0], DATATYPES["BYTES"], [4]).tolist() == expected
        assert response.raw_output_contents[1] == np.array([7, 8]).tobytes()


def config(*files: tuple[str, str]) -> ModelConfig:
    made = ModelConfig()
    for name, file in files:
        made.output.add(name=name, label_filename=file)
    return made


def test_labels_are_the_lines_of_the_configured_files(tmp_path: Path) -> None:
    (tmp_path / "fruit.txt").write_bytes(b"apple\nzw\xc3\xb6lf\n\nlast")
    (tmp_path / "dos.txt").write_bytes(b"a\r\nb\r\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    labels = read_labels(
        config(("y", "fruit.txt"), ("z", "dos.txt"), ("l", "latin.txt"), ("none", "")), tmp_path
    )
    assert labels["y"] == ("apple", "zwölf", "", "last")
    assert labels["z"] == ("a", "b")
    assert labels.keys() == {"y", "z", "l"}
    latin = Classifier(batched=True, labels=labels).classes("l", np.array([[1]]), 1)
    assert latin.tolist() == [[b"1:0:caf\xe9"]]


def test_a_model_without_config_or_directory_has_no_labels(tmp_path: Path) -> None:
    assert read_labels(None, tmp_path) == {}
    assert read_labels(config(("y", "labels.txt")), None) == {}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing.txt", "label_filename of output 'y' is 'missing.txt', which cannot be read (No such file"),
        (".", "which cannot be read"),
        ("../labels.txt", "'../labels.txt', which is outside of the model's directory"),
        ("/etc/hostname", "which is outside of the model's directory"),
        ("link.txt", "which is outside of the model's directory"),
        ("lab\0els.txt", "which is no file name"),
    ],
)
def test_a_missing_label_file_or_one_outside_the_models_directory_is_refused(
    tmp_path: Path, file: str, message: str
) -> None:
    (tmp_path / "labels.txt").write_text("a\n")
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "link.txt").symlink_to(tmp_path / "labels.txt")
    with pytest.raises(StartError) as caught:
        read_labels(config(("y", file)), directory)
    assert message in str(caught.value)


def test_a_model_is_loaded_with_its_labels(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("low\nmiddle\nhigh\n")
    path = small.twice(tmp_path / "model.onnx")
    config = text_format.Parse(
        'output { name: "y" data_type: TYPE_FP32 dims: 3 label_filename: "labels.txt" }', ModelConfig()
    )
    source = ModelSource("m", path, config=config, directory=tmp_path)
    model = load_model(source, LoadContext(ServerConfig((source,))))
    try:
        assert model.labels == {"y": ("low", "middle", "high")}
    finally:
        model.batcher.close(drain=False)
