"""The classification extension: order, format and shape of the classes, and their labels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.server.rig import Array, reproducible

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.errors import StartError
from tensorferry.server.inference.responses.classification import Classifier
from tensorferry.server.models.repository.labels import read_labels

ROWS = Classifier(batched=True)
RANKED = ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP32", "FP64"]


def classes(array: Any, count: int, classifier: Classifier = ROWS) -> Any:
    return classifier.classes("y", np.asarray(array), count).tolist()


def test_floats_have_six_decimals_and_integers_none() -> None:
    assert classes(np.array([[0.1, -2.0, 1e20, 1e-9]], np.float32), 4) == [
        [b"100000002004087734272.000000:2", b"0.100000:0", b"0.000000:3", b"-2.000000:1"]
    ]
    assert classes(np.array([[255, 0]], np.uint8), 2) == [[b"255:0", b"0:1"]]
    assert classes(np.array([[-math.inf, math.inf, math.nan]]), 3) == [[b"inf:1", b"-inf:0", b"nan:2"]]


def test_nan_is_lowest_also_among_few_of_a_long_row() -> None:
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


def test_a_class_without_a_label() -> None:
    labels = Classifier(batched=True, labels={"y": ("", "b"), "other": ("x",) * 3})
    assert classes(np.array([[3, 2, 1]]), 3, labels) == [[b"3:0", b"2:1:b", b"1:2"]]


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
        ("../labels.txt", "'../labels.txt', which is outside of the model's directory"),
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
