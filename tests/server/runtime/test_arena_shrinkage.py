"""Shrinkage of ONNX Runtime's arena after large batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import small

from tensorferry.batcher.testing import VirtualClock
from tensorferry.server.runtime.host_memory import resident_bytes
from tensorferry.server.runtime.session import Session

MIB = 1 << 20


def test_one_run_a_minute_shrinks_the_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr("tensorferry.server.runtime.session.time.monotonic", clock.now)
    session = Session(small.twice(tmp_path / "m.onnx"))
    seen = []

    def direct(names: Any, inputs: Any, options: Any) -> Any:
        seen.append("shrinking" if options is session._shrinking_options else "usual")
        return [None]

    session._direct = direct
    for seconds in (0, 59, 1, 1, 59, 600, 0):
        clock.advance(seconds)
        session.run({})
    assert seen == ["usual", "usual", "shrinking", "usual", "shrinking", "shrinking", "usual"]


def test_memory_of_a_large_batch_is_released(tmp_path: Path) -> None:
    text = """(float[batch, 256] x) => (float[batch, 1] y) {
        a = Exp (x) b = Concat <axis = 1> (x, a) y = ReduceMax <axes = [1]> (b)
    }"""
    path = small.written(tmp_path / "m.onnx", text)
    session = Session(path)
    session.run({"x": np.zeros((1, 256), np.float32)})
    before = resident_bytes()
    session.run({"x": np.zeros((100_000, 256), np.float32)})
    assert resident_bytes() - before > 200 * MIB
    session._shrink_at = 0.0
    session.run({"x": np.zeros((1, 256), np.float32)})
    assert resident_bytes() - before < 50 * MIB
