"""A bug in the batcher leaves no caller waiting, and no worker dead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import enqueue, error, occupy, result

from tensorferry.batcher import BatcherError
from tensorferry.batcher.statistics.counters import Counters
from tensorferry.batcher.testing import ScriptedRunner


def test_every_request_of_the_batch_gets_the_error(
    make: Make,
    runner: ScriptedRunner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*arguments: Any) -> int:
        raise ZeroDivisionError

    batcher = make(runner, 4)
    first = occupy(batcher, runner)
    queued = [enqueue(batcher, [float(x)])[1] for x in range(3)]
    # Called when the batch has run, before any answer.
    monkeypatch.setattr(Counters, "ran", broken)
    runner.open()
    assert str(error(first)) == "internal error while running the batch"
    for recorder in queued:
        assert isinstance(recorder.await_outcome().error, BatcherError)
    monkeypatch.undo()
    assert result(batcher.submit(np.float32(3))) == 6
    assert "this is a bug in tensorferry.batcher" in caplog.text
