"""The registry returns the version that serves a name, or an error if none does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from support.server.rig import signature, spec

from tensorferry.server.errors import NotFoundError, NotReadyError
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry, ModelState
from tensorferry.server.python.steps.named_model import ModelReference


def model(name: str, version: str = "1", max_batch_size: int = 8) -> Model:
    return Model(
        name, version, signature(spec("x", "FP32", "b")), max_batch_size, "in batches", cast(Any, None)
    )


def test_a_server_without_models_is_ready_only_if_models_can_be_loaded() -> None:
    for may_be_empty in (True, False):
        registry = ModelRegistry(may_be_empty=may_be_empty)
        assert not registry.serving
        registry.mark_complete()
        assert registry.serving == may_be_empty
        registry.mark_ready(loaded := model("m"))
        assert registry.serving
        registry.mark_unloaded(loaded)
        assert registry.serving == may_be_empty
    registry = ModelRegistry(may_be_empty=False)
    registry.mark_complete()
    registry.mark_failed("m", "1", "broken")
    assert not registry.serving


def test_an_unknown_model_may_still_come_until_the_start_is_complete() -> None:
    registry = ModelRegistry()
    with pytest.raises(NotReadyError, match="'m' is not loaded yet, if the server has it"):
        registry.get("m")
    # A pipeline that is loaded names its steps.
    with pytest.raises(NotFoundError):
        registry.find("m")
    registry.mark_complete()
    with pytest.raises(NotFoundError, match="the server has: none"):
        registry.get("m")


def test_the_highest_ready_version_is_the_latest() -> None:
    registry = ModelRegistry()
    registry.mark_ready(model("m", "1"))
    registry.mark_ready(model("m", "2"))
    registry.mark_loading("m", "3")
    registry.mark_failed("m", "4", "broken")
    assert registry.get("m").version == "2"
    assert registry.serves("m")
    registry.mark_unloading(registry.get("m"))
    assert registry.get("m").version == "1"
    registry.mark_unloading(registry.get("m"))
    assert not registry.serves("m")
    with pytest.raises(NotReadyError, match=r"version 4 is not at ready state: it is UNAVAILABLE \(broken\)"):
        registry.get("m")
    assert not registry.serves("other")


def test_a_model_serves_while_its_replacement_is_loaded_or_fails() -> None:
    registry = ModelRegistry()
    old, new = model("m"), model("m")
    assert registry.mark_ready(old) is None
    generation = registry.generation
    registry.mark_loading("m", "1")
    registry.mark_failed("m", "1", "broken")
    assert registry.get("m") is old
    assert registry.generation == generation
    assert registry.mark_ready(new) is old
    assert registry.get("m") is new
    registry.mark_unloaded(old)
    assert registry.get("m") is new, "the old one is not the one that is there"
    registry.mark_unloading(new)
    registry.mark_loading("m", "1")
    assert registry.step_model("m") is new
    registry.mark_unloaded(new)
    with pytest.raises(NotReadyError, match="LOADING"):
        registry.get("m")
    registry.mark_ready(new)
    registry.mark_unloading(new)
    registry.mark_failed("m", "1", "broken")
    assert registry.step_model("m") is new
    assert registry.mark_ready(old) is None, "the new one is being unloaded already"
    registry.mark_unloading(old)
    registry.mark_unloaded(old)
    (entry,) = registry.entries()
    assert (entry.state, entry.model, entry.reason) == (ModelState.UNAVAILABLE, None, "unloaded")


def test_a_model_that_was_replaced_meanwhile_is_unloaded_in_place_of_the_given_one() -> None:
    registry = ModelRegistry()
    old, new = model("m"), model("m")
    registry.mark_ready(old)
    assert registry.replace(old, new)
    assert registry.mark_unloading(old) is new
    assert [(entry.state, entry.model) for entry in registry.entries()] == [(ModelState.UNLOADING, new)]


def test_a_model_serves_again_if_its_steps_were_loaded_while_its_replacement_failed() -> None:
    registry = ModelRegistry()
    step = model("step")
    user = replace(model("user"), uses=(ModelReference("step", "", step.signature, True),))
    registry.mark_ready(step)
    registry.mark_ready(user)
    registry.mark_unloading(step)
    registry.mark_unloaded(step)
    assert not registry.serves("user")
    registry.mark_loading("user", "1")
    registry.mark_ready(step)
    registry.mark_failed("user", "1", "broken")
    assert registry.get("user") is user


def test_versions_are_sorted_as_numbers() -> None:
    registry = ModelRegistry()
    for version in ("10", "9"):
        registry.mark_ready(model("m", version))
    assert [entry.version for entry in registry.entries()] == ["9", "10"]


def test_the_only_model_is_known_while_there_is_exactly_one() -> None:
    registry = ModelRegistry()
    assert registry.only_model is None
    registry.mark_loading("a", "1")
    assert registry.only_model is None
    a, b = model("a"), model("b")
    registry.mark_ready(a)
    assert registry.only_model is a
    registry.mark_ready(b)
    assert registry.only_model is None
    registry.mark_unloading(a)
    assert registry.only_model is None, "its requests are still running"
    registry.mark_unloaded(a)
    assert registry.only_model is b
