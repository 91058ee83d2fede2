"""With polling, the loaded models follow the repository."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from support.models.controlled import ScriptedRepository
from support.server.rig import PATIENCE

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.batcher.testing import VirtualClock
from tensorferry.server.models.lifecycle.registry import ModelState

READY, UNAVAILABLE = ModelState.READY, ModelState.UNAVAILABLE


def test_polling_reports_an_unreadable_model_once(
    repository: ScriptedRepository, caplog: pytest.LogCaptureFixture
) -> None:
    repository.write("m", "1")
    control = repository.start("m")
    config = repository.root / "m" / "config.pbtxt"

    def complaints_of_two_looks() -> int:
        caplog.clear()
        for _ in range(2):
            control._poll()
        return len([record for record in caplog.records if "cannot be loaded" in record.message])

    config.write_text("max_batch_size: many")
    assert complaints_of_two_looks() == 1
    assert complaints_of_two_looks() == 0
    assert repository.serving() == "good"
    config.write_text("")
    assert complaints_of_two_looks() == 0
    config.write_text("max_batch_size: many")
    assert complaints_of_two_looks() == 1


def test_a_persistent_fault_restarts_the_thread_with_back_off(
    repository: ScriptedRepository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    repository.write("m", "1")
    clock = VirtualClock()
    control = repository.start("m", mode="poll", poll_seconds=0.0, backoff=RestartBackoff(clock))
    monkeypatch.setattr(control, "_poll", fails := Mock(side_effect=MemoryError))
    for count, seconds in enumerate((0.01, 0.02, 0.04), 1):
        clock.await_sleepers(until=clock.now() + seconds)
        assert fails.call_count == caplog.text.count("crashed (bug)") == count
        clock.advance(seconds)
    clock.await_sleepers()
    assert repository.serving() == "good"
    assert control.close(PATIENCE), "it waits for no pause"
