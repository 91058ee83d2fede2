"""Sessions: loading, outputs, and errors."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.models import small
from support.server.rig import Array, fp32

from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.runtime.session import Session


def numbers(name: str) -> Array:
    """Return values of shape [2, 3] in `storage` form, with strings as `str`."""
    if name == "BYTES":
        return np.array([["", "a\0b", "é"], ["line\n", "終", "x" * 5000]], dtype=object)
    if name == "BF16":
        return np.array([[0, 1, -2], [0.5, np.inf, np.nan]]).astype(ml_dtypes.bfloat16).view(np.uint16)
    storage = DATATYPES[name].storage
    if storage.kind == "f":
        return np.array([[0, -0.0, np.finfo(storage).max], [np.inf, np.nan, 0.5]], dtype=storage)
    return np.array([[0, 1, 2], [100, 50, 7]]).astype(storage)


@pytest.mark.parametrize("name", DATATYPES)
def test_arrays_of_every_datatype_and_size_are_unchanged(name: str, tmp_path: Path) -> None:
    session = Session(small.echo(tmp_path / "m.onnx", name))
    (given,) = session.signature.inputs
    assert (given.name, given.datatype.name, given.dims) == ("x", name, ("batch", "n"))
    whole = numbers(name)
    for x in (whole, whole[:1], whole[:0], whole[:, :0], np.ascontiguousarray(whole[:, 1:])):
        out = session.run({"x": x})["x_out"]
        assert (out.dtype, out.shape) == (x.dtype, x.shape)
        assert out.tolist() == x.tolist() if name == "BYTES" else out.tobytes() == x.tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"no model at all", "ONNX Runtime cannot load it: .*Protobuf parsing failed")],
)
def test_invalid_files_are_errors(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartError, match=message) as caught:
        Session(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_an_unsupported_type_names_file_and_tensor(tmp_path: Path) -> None:
    path = small.sequence(tmp_path / "m.onnx")
    with pytest.raises(StartError) as caught:
        Session(path)
    assert str(caught.value).startswith(f"{path}: output 'y' is of type seq(tensor(float))")


def test_a_failed_run_reports_node_and_reason_without_source_location(tmp_path: Path) -> None:
    session = Session(small.lookup(tmp_path / "m.onnx"))
    assert session.run({"index": np.array([9, 0])})["y"].tolist() == [[9], [0]]
    with pytest.raises(ModelFailedError) as caught:
        session.run({"index": np.array([1, 99])})
    message = str(caught.value)
    assert message.startswith(
        "the model failed on this request: Gather node: indices element out of data bounds"
    )
    assert "idx=99 must be within the inclusive range [-10,9]" in message
    assert caught.value.__cause__ is not None
    assert session.run({"index": np.array([3])})["y"].tolist() == [[3]]


def test_a_reason_with_source_locations_is_only_logged(tmp_path: Path) -> None:
    session = Session(small.added(tmp_path / "m.onnx"))
    with pytest.raises(ModelFailedError) as caught:
        session.run({"a": fp32(2, 2), "b": fp32(2, 3)})
    assert str(caught.value) == "the model failed on this request: Add node: the server's log has the reason"
    assert "/" in str(caught.value.__cause__)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="there is one core to be kept to")
def test_threads_are_limited_to_the_allowed_cores(tmp_path: Path) -> None:
    path = small.echo(tmp_path / "m.onnx", "FP32")
    allowed = os.sched_getaffinity(0)
    before = set(os.listdir("/proc/self/task"))
    try:
        os.sched_setaffinity(0, {min(allowed)})
        session = Session(path)
        made = set(os.listdir("/proc/self/task")) - before
        assert not made  # one core: the caller's own thread
    finally:
        os.sched_setaffinity(0, allowed)
    session.run({"x": fp32(1, 1)})
