"""Capture lock: exclusive captures, shared use, and a bounded wait."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polling import PATIENCE, until
from support.models import small
from support.models.controlled import run_in_thread
from support.server.cpu_as_device import CpuDeviceMemory

from tensorferry.server.runtime.gpu import capture_lock
from tensorferry.server.runtime.gpu.capture_lock import CaptureLock
from tensorferry.server.runtime.gpu.cuda_graphs import GraphOptions
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session


def test_a_capture_waits_for_users_and_blocks_new_ones() -> None:
    lock = CaptureLock(PATIENCE)
    first, capture, second = ExitStack(), ExitStack(), ExitStack()
    first.enter_context(lock.using())
    captures = run_in_thread(lambda: capture.enter_context(lock.capturing()))
    until(lambda: lock._capturing)
    uses = run_in_thread(lambda: second.enter_context(lock.using()))
    assert not captures.done()
    first.close()
    captures.result(PATIENCE)
    assert not uses.done()
    capture.close()
    uses.result(PATIENCE)
    second.close()


@pytest.mark.parametrize("held_by", ["using", "capturing"])
def test_a_capture_that_times_out_releases_the_lock(held_by: str) -> None:
    lock = CaptureLock(timeout=0.01)
    with getattr(lock, held_by)():
        with pytest.raises(TimeoutError), lock.capturing():
            pytest.fail("entered")
        if held_by == "using":
            with lock.using():
                pass
    # An exception releases it, too.
    with pytest.raises(ValueError, match="x"), getattr(lock, held_by)():
        raise ValueError("x")
    with lock.capturing():
        pass


def test_the_first_run_of_a_graph_holds_the_lock_exclusively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = OrtOptions(graphs=GraphOptions())
    session = Session(small.twice(tmp_path / "m.onnx"), "cpu", settings, CpuDeviceMemory())
    entered: list[str] = []

    class Recorded(CaptureLock):
        def capturing(self) -> Any:
            entered.append("capturing")
            return super().capturing()

        def using(self) -> Any:
            entered.append("using")
            return super().using()

    monkeypatch.setattr(capture_lock, "CUDA", Recorded())
    # It was loaded on the CPU. From here on it behaves as on a GPU.
    session.device = "cuda:0"
    assert session.capture([{"x": (2, 3)}], pads=True)
    assert entered == ["capturing", "using", "using"] * 2, (
        "two slots: captured, repeated, compared with a plain run"
    )
    entered.clear()
    session.run({"x": np.ones((1, 3), np.float32)})
    assert entered == ["using"]


def test_a_model_is_served_without_graphs_if_the_gpu_stays_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(
        small.twice(tmp_path / "m.onnx"), "cpu", OrtOptions(graphs=GraphOptions()), CpuDeviceMemory()
    )
    busy = CaptureLock(timeout=0.01)
    monkeypatch.setattr(capture_lock, "CUDA", busy)
    with busy.using():
        assert not session.capture([{"x": (2, 3)}], pads=True)
    assert "is served without CUDA graphs: other models kept the GPU busy" in caplog.text
