"""A copy of a file with a variable first axis, and the command that makes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.models import small
from support.models.small import node, save, value

from tensorferry.server.inspection.variable_axis import NoCopy, write_copy
from tensorferry.server.runtime.session import Session
from tensorferry.server.signature import Signature


def copied(path: Path, target: Path) -> tuple[str, Signature]:
    command = write_copy(path, Session(path).signature, target)
    return command, Session(target).signature


def test_tensors_with_the_same_first_dimension_get_the_axis(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx",
        [node("Mul", "x scale", "a"), node("Add", "a bias", "y")],
        [value("x", dims=[4, "n"]), value("scale", dims=[1]), value("bias", dims=[4, None])],
        [value("y", dims=[4, "n"])],
    )
    _, signature = copied(path, tmp_path / "copy.onnx")
    assert [spec.shape for spec in signature.inputs] == [(-1, -1), (1,), (-1, -1)]
    assert [spec.shape for spec in signature.outputs] == [(-1, -1)]
    assert signature.no_batch_axis_reason() is None


def test_the_command_makes_the_copy_beside_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    path = small.twice(folder / 'a"b.onnx', dims=(1, 3))
    command, _ = copied(path, tmp_path / "copy.onnx")
    assert command.startswith("python -c ")
    shown = command.replace("python", sys.executable, 1)
    subprocess.run(shown, shell=True, check=True, timeout=60)
    made = folder / 'a"b-batch.onnx'
    assert made.read_bytes() == (tmp_path / "copy.onnx").read_bytes()
    x = np.ones((5, 3), np.float32)
    np.testing.assert_array_equal(Session(made).run({"x": x})["y"], 2 * x)


def test_a_file_without_a_fixed_axis_is_not_changed(tmp_path: Path) -> None:
    path = small.twice(tmp_path / "m.onnx")
    with pytest.raises(NoCopy, match="no first dimension is fixed"):
        write_copy(path, Session(path).signature, tmp_path / "copy.onnx")


def test_weights_in_another_file_are_not_copied(tmp_path: Path) -> None:
    path = small.twice(tmp_path / "m.onnx", dims=(1, 3))
    model = onnx.load(str(path))
    onnx.save(model, str(path), save_as_external_data=True, size_threshold=0, location="weights")
    with pytest.raises(NoCopy, match="its weights are in files of their own"):
        write_copy(path, Session(path).signature, tmp_path / "copy.onnx")


def test_a_file_that_the_checker_refuses_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise onnx.checker.ValidationError("bad\n  graph")

    path = small.twice(tmp_path / "m.onnx", dims=(1, 3))
    signature = Session(path).signature
    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    with pytest.raises(NoCopy, match="bad graph"):
        write_copy(path, signature, tmp_path / "copy.onnx")
