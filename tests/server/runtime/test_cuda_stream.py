"""Streams with a priority, which the server creates and passes to ONNX Runtime."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.models import small
from support.server.cuda_runtime import Runtime, cudaError_t, installed

from tensorferry.server.runtime.gpu.pinned_memory import DeviceMemory
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session

PROVIDERS = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]


class SessionOnCpu:
    """ONNX Runtime session that reports the requested providers and computes on the CPU."""

    given: list[list[tuple[str, dict[str, Any]]]]

    def __init__(self, path: str, options: Any, *, providers: Any, **others: Any) -> None:
        self.given.append(providers)
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._sess = self._session._sess
        self.get_inputs, self.get_outputs = self._session.get_inputs, self._session.get_outputs
        self.get_overridable_initializers = self._session.get_overridable_initializers
        self.io_binding = self._session.io_binding
        self.run_with_iobinding = self._session.run_with_iobinding

    def get_providers(self) -> list[str]:
        return [name for name, _ in self.given[-1]]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return installed(monkeypatch)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, dict[str, Any]]]]:
    """Providers of each session that is created."""
    SessionOnCpu.given = []
    monkeypatch.setattr(
        "tensorferry.server.runtime.session.open_session",
        lambda path, options, providers, device: SessionOnCpu(str(path), options, providers=providers),
    )
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: PROVIDERS)
    # The scripted runtime allocates ordinary memory, so ONNX Runtime must treat it as the CPU's.
    monkeypatch.setattr(DeviceMemory, "device_type", "cpu")
    return SessionOnCpu.given


@pytest.mark.parametrize(("device", "options"), [("cuda:0", {}), ("cuda:2", {"device_id": 2})])
def test_the_first_device_is_not_named(
    device: str, options: Any, runtime: Runtime, given: Any, tmp_path: Path
) -> None:
    """ONNX Runtime warns of an option `device_id` at each session."""
    Session(small.mlp(tmp_path / "m.onnx"), device)
    assert given[0][0] == ("CUDAExecutionProvider", options)


@pytest.mark.parametrize(("first", "number"), [(True, -5), (False, 0)])
def test_the_stream_has_the_priority_and_exists_as_long_as_the_session(
    first: bool, number: int, runtime: Runtime, given: Any, tmp_path: Path
) -> None:
    session = Session(small.mlp(tmp_path / "m.onnx"), "cuda:3", OrtOptions(kernels_first=first))
    (stream,) = runtime.priorities
    assert runtime.priorities[stream] == number
    ((name, options), (_, none)) = given[0]
    assert (name, options) == ("CUDAExecutionProvider", {"device_id": 3, "user_compute_stream": str(stream)})
    assert none == {}, "the CPU has no streams"
    # New versions of ONNX Runtime keep such a reference in a binding.
    kept = session._session._sess
    del session
    gc.collect()
    assert stream in runtime.streams, "ONNX Runtime's session still uses it"
    del kept
    gc.collect()
    assert stream not in runtime.streams


def test_a_model_is_served_without_a_stream_if_creating_it_fails(
    runtime: Runtime, given: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.error = cudaError_t.cudaErrorInsufficientDriver
    session = Session(small.mlp(tmp_path / "m.onnx"), "cuda:3", OrtOptions(kernels_first=True))
    assert session.run({"x": np.zeros((2, 8), np.float32)})["p"].shape == (2, 4)
    assert "user_compute_stream" not in given[0][0][1]
    (record, *_) = [record for record in caplog.records if "runs without a priority" in record.message]
    assert record.levelno == logging.WARNING
    assert "m.onnx on cuda:3 runs without a priority: " in record.message
