"""Replaced and unloaded models answer the requests that they have accepted, and release their memory."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
from support.models.controlled import ScriptedRepository, runner_of
from support.server.rig import PATIENCE

from tensorferry.server.errors import NotReadyError
from tensorferry.server.models.lifecycle.registry import ModelState
from tensorferry.server.system import malloc

READY, UNAVAILABLE = ModelState.READY, ModelState.UNAVAILABLE


def test_a_model_is_unloaded_after_its_requests(repository: ScriptedRepository) -> None:
    repository.write("m", "1", "slow")
    control = repository.start("m")
    model = repository.registry.get("m")
    future = model.batcher.submit(np.float32(1))
    control.unload("m")
    with pytest.raises(NotReadyError, match="it is UNLOADING"):
        repository.registry.get("m")
    runner_of[model.batcher].open()
    assert future.result(PATIENCE) == 2
    repository.await_state(("m", "1", UNAVAILABLE))
    with pytest.raises(NotReadyError, match=r"it is UNAVAILABLE \(unloaded\)"):
        repository.registry.get("m")
    control.unload("m")
    control.load("m")
    assert repository.serving() == "slow"


def test_closing_waits_until_unloaded_models_have_released_their_memory(
    repository: ScriptedRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    releasing, release = threading.Event(), threading.Event()

    def wait() -> None:
        releasing.set()
        assert release.wait(PATIENCE)

    monkeypatch.setattr(malloc, "give_back", wait)
    repository.write("m", "1", "fast")
    control = repository.start("m")
    control.unload("m")
    assert releasing.wait(PATIENCE)
    assert control.drain(0.0), "it has answered everything"
    assert not control.close(0.0)
    release.set()
    assert control.close(PATIENCE)


def test_no_reference_to_an_unloaded_model_is_left(repository: ScriptedRepository) -> None:
    repository.write("m", "1")
    control = repository.start("m")
    left = weakref.ref(repository.registry.get("m").batcher)
    control.unload("m")
    repository.await_state(("m", "1", UNAVAILABLE))
    # The thread has reported the end of the model, and ends soon.
    assert control.close(PATIENCE)
    assert left() is None


def test_drain_waits_for_models_that_are_being_unloaded(repository: ScriptedRepository) -> None:
    repository.write("m", "1", "slow")
    control = repository.start("m")
    model = repository.registry.get("m")
    future = model.batcher.submit(np.float32(1))
    control.unload("m")
    assert not control.drain(0.0)
    runner_of[model.batcher].open()
    assert control.drain(float("inf"))
    assert future.done()
