"""Models are loaded at the start, as clients request, or as files change. A version serves until its replacement is ready."""

from __future__ import annotations

from pathlib import Path

import pytest
from polling import until
from support.models.controlled import ScriptedRepository, run_in_thread
from support.server.rig import PATIENCE

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import (
    InvalidRequestError,
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    StartError,
)
from tensorferry.server.models.lifecycle.registry import ModelState

READY, UNAVAILABLE = ModelState.READY, ModelState.UNAVAILABLE


def test_a_missing_model_fails_the_start(repository: ScriptedRepository) -> None:
    with pytest.raises(
        StartError, match="--load-model: failed to load 'm', failed to poll from model repository"
    ):
        repository.start("m", strict=False)


def test_a_name_may_be_used_only_once(repository: ScriptedRepository) -> None:
    repository.add("m", "1")
    with pytest.raises(
        StartError, match="'m' is named on the command line and is in the model repository too"
    ):
        repository.start(
            "*", mode="none", named=(ModelSource("m", repository.root / "m" / "1" / "model.onnx"),)
        )


def test_only_new_versions_are_loaded(repository: ScriptedRepository) -> None:
    control = repository.start()
    with pytest.raises(NotFoundError, match="failed to load 'm', failed to poll from model repository"):
        control.load("m")
    repository.add("m", "1")
    control.load("m")
    control.load("m")
    assert repository.loads == ["m/1: good"]
    repository.add("m", "1", "better")
    assert repository.serving() == "good", "not before it is asked for"
    control.load("m")
    assert repository.serving() == "better"


def test_a_broken_version_is_tried_again_on_request(repository: ScriptedRepository) -> None:
    repository.add("m", "1", "broken")
    control = repository.start()
    for _ in range(2):
        with pytest.raises(LoadFailedError):
            control.load("m")
    assert repository.loads == ["m/1: broken"] * 2


def test_a_model_whose_device_has_failed_is_loaded_again_on_request(repository: ScriptedRepository) -> None:
    repository.add("m", "1")
    control = repository.start("m")
    health = repository.registry.get("m").health
    health.name, health.version = "m", "1"
    health.mark_down(0, "the device has failed")
    repository.registry.health_changed(health)
    assert repository.states() == {"m": UNAVAILABLE}
    control.load("m")
    assert repository.states() == {"m": READY}


def test_a_bug_while_loading_leaves_no_version_loading(repository: ScriptedRepository) -> None:
    repository.add("m", "1", "a bug")
    control = repository.start()
    with pytest.raises(ZeroDivisionError):
        control.load("m")
    assert repository.states() == {"m": UNAVAILABLE}
    repository.add("m", "1", "mended")
    control.load("m")
    assert repository.serving() == "mended"


def test_uploaded_files_that_cannot_be_stored_are_refused(repository: ScriptedRepository) -> None:
    control = repository.start()
    for files in ({"1/a": b"", "1/a/b": b""}, {f"1/{'a' * 300}": b""}):
        with pytest.raises(LoadFailedError, match=r"'sent': the uploaded files cannot be stored \("):
            control.load("sent", ModelConfig(), files)


def test_an_unreadable_repository_is_an_error(repository: ScriptedRepository) -> None:
    control = repository.start()
    repository.root.rename(repository.root.with_name("elsewhere"))
    with pytest.raises(NotReadyError, match="cannot be read"):
        control.models_without_versions()
    with pytest.raises(NotReadyError, match="cannot be read"):
        control.unload("m")


def test_models_named_on_the_command_line_are_not_controlled(repository: ScriptedRepository) -> None:
    repository.add("m", "1")
    path = repository.root / "m" / "1" / "model.onnx"
    control = repository.start(named=(ModelSource("named", path),))
    assert repository.serving("named") == "good"
    for action in (control.load, control.unload):
        with pytest.raises(InvalidRequestError, match="'named' was named on the command line by its file"):
            action("named")


def test_no_model_is_loaded_during_shutdown(repository: ScriptedRepository) -> None:
    repository.add("m", "1")
    control = repository.start("m")
    assert control.close(PATIENCE)
    with pytest.raises(NotReadyError, match="shutting down"):
        control.load("m")


def test_a_waiting_caller_gets_an_error_at_shutdown(repository: ScriptedRepository) -> None:
    repository.add("m", "1")
    control = repository.start()
    repository.hold.clear()
    first = run_in_thread(lambda: control.load("m"))
    assert repository.holding.wait(PATIENCE)
    second = run_in_thread(lambda: control.unload("m"))
    assert until(lambda: not control._commands.empty())
    assert not control.close(0.0), "a load cannot be interrupted"
    repository.hold.set()
    first.result(PATIENCE)
    with pytest.raises(NotReadyError, match="shutting down"):
        second.result(PATIENCE)


# Polling.


def test_a_version_that_could_not_be_loaded_is_forgotten_once_it_is_gone(
    repository: ScriptedRepository, tmp_path: Path
) -> None:
    repository.add("m", "1")
    control = repository.start("m")
    gone = {repository.root / name: tmp_path / name.replace("/", "-") for name in ("m/2", "bad")}

    def unloaded() -> dict[tuple[str, str], bool]:
        return {(each.name, each.version): each.is_unloaded for each in repository.registry.entries()}

    repository.add("m", "2", "broken")
    repository.add("bad", "1", "broken")
    control._poll()
    assert not any(unloaded().values())
    for path, elsewhere in gone.items():
        path.rename(elsewhere)
    control._poll()
    assert unloaded() == {("bad", "1"): True, ("m", "1"): False, ("m", "2"): True}
    assert repository.serving() == "good"
    for path, elsewhere in gone.items():
        elsewhere.rename(path)
    control._poll()
    assert sorted(repository.loads[1:]) == ["bad/1: broken", "bad/1: broken", "m/2: broken", "m/2: broken"]


def test_polling_reports_an_unreadable_model_once(
    repository: ScriptedRepository, caplog: pytest.LogCaptureFixture
) -> None:
    repository.add("m", "1")
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
