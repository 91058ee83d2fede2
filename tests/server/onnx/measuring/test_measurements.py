"""An ONNX model is measured in a process of its own, which may die."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models import small

from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.models.config_pbtxt.io_mapping import IoMapping
from tensorferry.server.onnx.measuring.core_layouts import Layout
from tensorferry.server.onnx.measuring.measurements import Measurements, lengths_of, measure_file
from tensorferry.server.onnx.measuring.measuring_child import MeasuredModel
from tensorferry.server.runtime.files.fp16 import ModelFile
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session
from tensorferry.server.signature import Signature, TensorSpec

Send = Callable[[Mapping[str, Any]], None]
Measure = Callable[[MeasuredModel, Send], None]


def subject(path: Path, sizes: tuple[int, ...] = (1, 2, 4)) -> MeasuredModel:
    io_mapping = IoMapping(Session(path).signature)
    return MeasuredModel(ModelFile(path, path), "cpu", OrtOptions(), io_mapping, 4, sizes, 60.0)


ONE_SIZE = {"rows": 1, "seconds": 0.5, "runs": 5, "memory_bytes": 7}


def one_size(model: MeasuredModel, send: Send) -> None:
    send({"loaded_bytes": 1, "memory": ""})
    send(ONE_SIZE)


def aborts(model: MeasuredModel, send: Send) -> None:
    one_size(model, send)
    os.abort()


def exits(model: MeasuredModel, send: Send) -> None:
    one_size(model, send)
    os._exit(3)


def hangs(model: MeasuredModel, send: Send) -> None:
    # The time limit of the first message is long.
    send(ONE_SIZE)
    signal.pause()


def dies(model: MeasuredModel, send: Send) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def measured_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], Measurements]:
    """Measures by one of the functions above."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parents[3])]))
    given = subject(small.twice(tmp_path / "m.onnx"))

    def measured(function: Measure) -> Measurements:
        # A hang is noticed after a second, and an end has the time of a busy machine.
        seconds = 0.0 if function is hangs else 10.0
        monkeypatch.setattr("tensorferry.server.onnx.measuring.measurements.measure", function)
        return measure_file(replace(given, seconds=seconds))

    return measured


def test_each_size_is_measured(tmp_path: Path) -> None:
    measured = measure_file(subject(small.mlp(tmp_path / "m.onnx")))
    assert [batch.rows for batch in measured.batches] == [1, 2, 4]
    assert all(batch.seconds > 0 and batch.runs >= 3 for batch in measured.batches)
    assert all(batch.memory_bytes is not None for batch in measured.batches)
    assert measured.loaded_bytes is not None
    assert (measured.devices, measured.stopped) == (("cpu",), "")
    assert "resident memory" in measured.memory


def test_axes_without_a_name_are_named_by_their_input() -> None:
    fp32 = DATATYPES["FP32"]
    inputs = (TensorSpec("x", fp32, ("batch", "", 3, "n")), TensorSpec("y", fp32, ("batch", "n")))
    assert lengths_of(Signature(inputs, ()), 4, {"n": 7}) == {"x[1]": 4, "n": 7}


def test_a_wide_batch_takes_its_memory(tmp_path: Path) -> None:
    width = 1 << 20
    measured = measure_file(subject(small.wide(tmp_path / "m.onnx", width), (1, 8)))
    one, eight = (batch.memory_bytes or 0 for batch in measured.batches)
    # Inputs of 4 bytes.
    assert eight > 8 * width * 4 * 0.9
    assert one < eight / 2


def test_a_batch_that_fails_ends_the_sizes(tmp_path: Path) -> None:
    measured = measure_file(subject(small.one_row_only(tmp_path / "m.onnx")))
    assert [batch.rows for batch in measured.batches] == [1]
    assert measured.stopped.startswith(
        "a batch of 2 rows: Non-zero status code returned while running Gather node"
    )


@pytest.mark.parametrize(
    ("function", "kept", "said"),
    [
        (aborts, [(1, 7)], "the process that measures ended at a batch of 2 rows: killed by SIGABRT"),
        (hangs, [(1, 7)], "a batch of 2 rows did not end in time"),
        (exits, [(1, 7)], "the process that measures ended at a batch of 2 rows: exit status 3"),
        (dies, [], "the process that measures ended at a batch of 1 rows: killed by SIGKILL"),
    ],
)
def test_what_was_measured_before_the_process_died_is_kept(
    measured_by: Callable[[Measure], Measurements], function: Measure, kept: Any, said: str
) -> None:
    measured = measured_by(function)
    assert [(batch.rows, batch.memory_bytes) for batch in measured.batches] == kept
    assert measured.stopped == said


def test_layouts_of_the_cores_are_measured_after_the_sizes(tmp_path: Path) -> None:
    given = replace(subject(small.mlp(tmp_path / "m.onnx")), layouts=(Layout(1, 2), Layout(2, 1)))
    measured = measure_file(given)
    assert [(each.sessions, each.threads) for each in measured.layouts] == [(1, 2), (2, 1)]
    assert all(each.rows_per_second > 0 and each.alone_seconds > 0 for each in measured.layouts)
    assert len({each.rows for each in measured.layouts} & {1, 2, 4}) == 1
    assert measured.stopped == ""
