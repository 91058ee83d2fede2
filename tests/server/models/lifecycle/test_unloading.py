"""Replaced and unloaded models answer the requests that they have accepted, and release their memory."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
from polling import until
from support.models.controlled import ScriptedRepository
from support.server.rig import PATIENCE

from tensorferry.server.errors import NotReadyError
from tensorferry.server.models.lifecycle.registry import ModelState
from tensorferry.server.system import malloc


def test_a_model_is_unloaded_after_its_requests(repository: ScriptedRepository) -> None:
    repository.add("m", "1", "slow")
    control = repository.start("m")
    model = repository.registry.get("m")
    future = model.batcher.submit(np.float32(1))
    control.unload("m")
    with pytest.raises(NotReadyError, match="it is UNLOADING"):
        repository.registry.get("m")
    assert not control.drain(0.0)
    repository.runners[-1].open()
    assert control.drain(float("inf"))
    assert future.result(0) == 2
    until(repository.states, {"m": ModelState.UNAVAILABLE}.__eq__)
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
    repository.add("m", "1", "fast")
    control = repository.start("m")
    control.unload("m")
    assert releasing.wait(PATIENCE)
    assert control.drain(0.0), "it has answered everything"
    assert not control.close(0.0)
    release.set()
    assert control.close(PATIENCE)


def test_no_reference_to_an_unloaded_model_is_left(repository: ScriptedRepository) -> None:
    repository.add("m", "1")
    control = repository.start("m")
    left = weakref.ref(repository.registry.get("m").batcher)
    control.unload("m")
    until(repository.states, {"m": ModelState.UNAVAILABLE}.__eq__)
    # The thread has reported the end of the model, and ends soon.
    assert control.close(PATIENCE)
    assert left() is None
