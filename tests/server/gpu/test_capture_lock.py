"""While a graph is captured nothing else uses the device, and a capture does not wait for ever."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polling import until
from support.models import small
from support.server.cpu_as_device import CpuDeviceMemory

from tensorferry.server.gpu import capture_lock
from tensorferry.server.gpu.capture_lock import CaptureLock
from tensorferry.server.gpu.cuda_graphs import GraphOptions
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session

PATIENCE = 30.0


class Inside(threading.Thread):
    """Enters, says so, and stays until it is let go."""

    def __init__(self, context: AbstractContextManager[None]) -> None:
        super().__init__(daemon=True)
        self._context = context
        self.entered, self.leave = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with self._context:
                self.entered.set()
                assert self.leave.wait(PATIENCE)
        except BaseException as error:
            self.error = error

    def let_go(self) -> None:
        self.leave.set()
        self.join(PATIENCE)
        assert self.error is None


def test_many_use_it_at_a_time() -> None:
    door = CaptureLock()
    threads = [Inside(door.using()) for _ in range(3)]
    assert all(thread.entered.wait(PATIENCE) for thread in threads)
    for thread in threads:
        thread.let_go()


def test_a_capture_waits_for_those_inside_and_keeps_newcomers_out() -> None:
    door = CaptureLock(PATIENCE)
    first = Inside(door.using())
    assert first.entered.wait(PATIENCE)
    capture = Inside(door.capturing())
    until(lambda: door._capturing)
    second = Inside(door.using())
    assert not capture.entered.is_set()
    first.let_go()
    assert capture.entered.wait(PATIENCE)
    assert not second.entered.is_set()
    capture.let_go()
    assert second.entered.wait(PATIENCE)
    second.let_go()


def test_captures_come_one_after_another() -> None:
    door = CaptureLock(PATIENCE)
    first = Inside(door.capturing())
    assert first.entered.wait(PATIENCE)
    second = Inside(door.capturing())
    assert not second.entered.is_set()
    first.let_go()
    assert second.entered.wait(PATIENCE)
    second.let_go()


@pytest.mark.parametrize("inside", ["using", "capturing"])
def test_a_capture_gives_up_and_leaves_the_gate_as_it_was(inside: str) -> None:
    door = CaptureLock(timeout=0.01)
    hung = Inside(getattr(door, inside)())
    assert hung.entered.wait(PATIENCE)
    with pytest.raises(TimeoutError), door.capturing():
        pytest.fail("entered")
    if inside == "using":
        other = Inside(door.using())
        assert other.entered.wait(PATIENCE)
        other.let_go()
    hung.let_go()
    with door.capturing():
        pass


def test_what_raises_inside_leaves_it_open() -> None:
    door = CaptureLock()
    for enter in (door.using, door.capturing):
        with pytest.raises(ValueError, match="x"), enter():
            raise ValueError("x")
    with door.capturing():
        pass


def test_the_first_run_of_a_graph_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # Loaded on the CPU, it takes itself for one on a GPU from here on.
    session.device = "cuda:0"
    assert session.capture([{"x": (2, 3)}], pads=True)
    assert entered == ["capturing", "using", "using"] * 2, "captured, again, and compared with a run without"
    entered.clear()
    session.run({"x": np.ones((1, 3), np.float32)})
    assert entered == ["using"]


def test_a_capture_that_cannot_begin(
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
