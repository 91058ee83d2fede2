"""Models come and go while requests run: what serves goes on until its successor does."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.rig import PATIENCE, signature, spec

from tensorferry.batcher import Batcher
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config import ModelSource
from tensorferry.server.control import ModelControl
from tensorferry.server.errors import (
    InvalidRequestError,
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    StartError,
)
from tensorferry.server.models import Model, ModelRegistry, ModelState
from tensorferry.server.repository import Repository

READY, UNAVAILABLE = ModelState.READY, ModelState.UNAVAILABLE


class Commands(queue.SimpleQueue[Any]):
    """Says when one was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = threading.Event()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self.given.set()


class World:
    """A repository on disk, and a loader that knows what is in the files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.registry = ModelRegistry()
        self.loads: list[str] = []
        self.changed: list[str] = []
        self.configs: list[ModelConfig | None] = []
        # Notified when a model has changed.
        self._news = threading.Condition()
        self.hold: threading.Event | None = None
        self.holding = threading.Event()
        self.commands = Commands()
        self.control: ModelControl

    def write(self, name: str, version: str, content: str = "good") -> None:
        path = self.root / name / version / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def remove(self, name: str, version: str = "") -> None:
        for path in sorted((self.root / name / version).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (self.root / name / version).rmdir()

    def load(self, source: ModelSource) -> Model:
        content = source.path.read_text()
        self.loads.append(f"{source.name}/{source.version}: {content}")
        self.configs.append(source.config)
        if self.hold is not None:
            self.holding.set()
            assert self.hold.wait(PATIENCE)
        if content == "a bug":
            raise ZeroDivisionError
        if content == "broken":
            raise StartError(f"{source.path} is broken")
        runner = ScriptedRunner(gated=content == "slow")
        batcher = Batcher(runner, 4, name=source.name)
        model = Model(source.name, source.version, signature(spec("x", "FP32", "b")), 4, content, batcher)
        runner_of[batcher] = runner
        return model

    def note(self, name: str) -> None:
        with self._news:
            self.changed.append(name)
            self._news.notify_all()

    def await_state(self, *states: tuple[str, str, ModelState]) -> None:
        """Until these are the versions that there are."""
        with self._news:
            assert self._news.wait_for(lambda: self.states() == list(states), PATIENCE), self.states()

    def states(self) -> list[tuple[str, str, ModelState]]:
        return [(entry.name, entry.version, entry.state) for entry in self.registry.entries()]

    def serving(self, name: str = "m", version: str = "") -> str:
        """What was in the file of the version that serves."""
        return self.registry.get(name, version).batching

    def start(
        self,
        *names: str,
        mode: str = "explicit",
        named: tuple[ModelSource, ...] = (),
        strict: bool = True,
        poll_seconds: float = 3600.0,
    ) -> ModelControl:
        self.control = ModelControl(
            self.registry, Repository([self.root]), self.load, self.note, mode=mode, poll_seconds=poll_seconds
        )
        self.control._commands = self.commands
        self.control.start(named, names, strict=strict)
        return self.control


runner_of: weakref.WeakKeyDictionary[Batcher, ScriptedRunner] = weakref.WeakKeyDictionary()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "models").mkdir()
    world = World(tmp_path / "models")
    yield world
    for runner in list(runner_of.values()):
        runner.open()
    if world.hold is not None:
        world.hold.set()
    assert world.control.close(PATIENCE), "a thread did not end"
    for model in world.registry.models():
        assert model.batcher.close()


def elsewhere(action: Callable[[], Any]) -> Future[Any]:
    """Does it on a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_at_the_start_all_or_those_that_are_named(world: World) -> None:
    for name in ("a", "b", "c"):
        world.write(name, "1")
    world.start("a", "c")
    assert world.states() == [("a", "1", READY), ("c", "1", READY)]
    assert world.changed == ["a", "c"]
    assert world.control.without_versions() == {"b": ""}


def test_all(world: World) -> None:
    world.write("a", "1")
    world.write("b", "3")
    world.start("*", mode="none")
    assert world.states() == [("a", "1", READY), ("b", "3", READY)]


def test_one_that_is_broken_ends_the_start_or_not(world: World) -> None:
    world.write("a", "1", "broken")
    world.write("b", "1")
    with pytest.raises(
        StartError, match=r"load failed for model 'a': version 1 is at UNAVAILABLE state: .*broken"
    ):
        world.start("*", mode="none")
    world.registry = ModelRegistry()
    world.start("*", mode="none", strict=False)
    assert world.states() == [("a", "1", UNAVAILABLE), ("b", "1", READY)]
    assert "is broken" in world.registry.entries()[0].reason


def test_one_that_is_not_there_ends_the_start(world: World) -> None:
    with pytest.raises(
        StartError, match="--load-model: failed to load 'm', failed to poll from model repository"
    ):
        world.start("m", strict=False)


def test_a_name_is_given_once(world: World) -> None:
    world.write("m", "1")
    with pytest.raises(
        StartError, match="'m' is named on the command line and is in the model repository too"
    ):
        world.start("*", mode="none", named=(ModelSource("m", world.root / "m" / "1" / "model.onnx"),))


def test_load_what_is_new_and_nothing_twice(world: World) -> None:
    control = world.start()
    with pytest.raises(NotFoundError, match="failed to load 'm', failed to poll from model repository"):
        control.load("m")
    world.write("m", "1")
    control.load("m")
    control.load("m")
    assert world.loads == ["m/1: good"]
    world.write("m", "1", "better")
    assert world.serving() == "good", "not before it is asked for"
    control.load("m")
    assert world.serving() == "better"


def test_the_old_serves_until_the_new_does_and_answers_what_it_has(world: World) -> None:
    world.write("m", "1", "slow")
    control = world.start("m")
    old = world.registry.get("m")
    running = old.batcher.submit(np.float32(1))
    queued = old.batcher.submit(np.float32(2))
    world.write("m", "1", "new")
    world.hold = threading.Event()
    loading = elsewhere(lambda: control.load("m"))
    assert world.holding.wait(PATIENCE)
    assert world.registry.get("m") is old
    world.hold.set()
    loading.result(PATIENCE)
    assert world.serving() == "new"
    runner_of[old.batcher].open()
    assert [running.result(PATIENCE), queued.result(PATIENCE)] == [2, 4]


def test_a_broken_new_version_leaves_the_old_one_serving(world: World) -> None:
    world.write("m", "1")
    control = world.start("m")
    world.write("m", "2", "broken")
    with pytest.raises(LoadFailedError, match="load failed for model 'm': version 2 is at UNAVAILABLE state"):
        control.load("m")
    assert world.serving() == "good"
    assert world.states() == [("m", "1", READY), ("m", "2", UNAVAILABLE)]
    world.write("m", "1", "broken")
    world.remove("m", "2")
    with pytest.raises(LoadFailedError):
        control.load("m")
    assert world.serving() == "good"
    world.write("m", "2", "good at last")
    control.load("m")
    assert world.serving() == "good at last"
    world.await_state(("m", "1", UNAVAILABLE), ("m", "2", READY))
    with pytest.raises(NotReadyError, match="version 1 is not at ready state: it is UNAVAILABLE"):
        world.serving(version="1")


def test_what_is_broken_is_tried_again_when_asked_for(world: World) -> None:
    world.write("m", "1", "broken")
    control = world.start()
    for _ in range(2):
        with pytest.raises(LoadFailedError):
            control.load("m")
    assert world.loads == ["m/1: broken"] * 2


def test_a_model_whose_configuration_cannot_be_read_has_a_reason_and_no_version(world: World) -> None:
    world.write("m", "1")
    world.write("never", "1")
    config = world.root / "m" / "config.pbtxt"
    config.write_text("batch: 1")
    control = world.start("m", strict=False)
    reasons = control.without_versions()
    assert list(reasons) == ["m", "never"]
    assert 'line 1, column 1: Message type "inference.ModelConfig" has no field named "batch"' in reasons["m"]
    assert reasons["never"] == ""
    config.unlink()
    control.load("m")
    assert list(control.without_versions()) == ["never"]
    # While a version serves, the model is no worse than it was.
    config.write_text("batch: 1")
    with pytest.raises(LoadFailedError):
        control.load("m")
    assert list(control.without_versions()) == ["never"]
    control.unload("m")
    world.await_state(("m", "1", UNAVAILABLE))
    assert list(control.without_versions()) == ["never"]
    with pytest.raises(LoadFailedError):
        control.load("m")
    assert list(control.without_versions()) == ["m", "never"]


def test_a_bug_while_loading_leaves_no_version_loading(world: World) -> None:
    world.write("m", "1", "a bug")
    control = world.start()
    with pytest.raises(ZeroDivisionError):
        control.load("m")
    assert world.states() == [("m", "1", UNAVAILABLE)]
    world.write("m", "1", "mended")
    control.load("m")
    assert world.serving() == "mended"


def test_a_config_that_is_given_and_files(world: World) -> None:
    world.write("m", "1")
    world.write("m", "2", "two")
    control = world.start("m")
    config = ModelConfig()
    config.version_policy.all.SetInParent()
    control.load("m", config)
    assert world.states() == [("m", "1", READY), ("m", "2", READY)]
    control.load("m", config)
    assert world.loads == ["m/2: two", "m/1: good", "m/2: two"], "the second time nothing has changed"
    control.load("m", config, {"3/model.onnx": b"sent"})
    assert world.serving() == "sent"
    world.await_state(("m", "1", UNAVAILABLE), ("m", "2", UNAVAILABLE), ("m", "3", READY))
    control.load("m")
    assert world.serving() == "two"
    world.await_state(("m", "1", UNAVAILABLE), ("m", "2", READY), ("m", "3", UNAVAILABLE))


def test_unload(world: World) -> None:
    world.write("m", "1", "slow")
    control = world.start("m")
    model = world.registry.get("m")
    future = model.batcher.submit(np.float32(1))
    control.unload("m")
    with pytest.raises(NotReadyError, match="it is UNLOADING"):
        world.registry.get("m")
    runner_of[model.batcher].open()
    assert future.result(PATIENCE) == 2
    world.await_state(("m", "1", UNAVAILABLE))
    with pytest.raises(NotReadyError, match=r"it is UNAVAILABLE \(unloaded\)"):
        world.registry.get("m")
    control.unload("m")
    control.load("m")
    assert world.serving() == "slow"


def test_nothing_keeps_what_was_unloaded(world: World) -> None:
    world.write("m", "1")
    control = world.start("m")
    left = weakref.ref(world.registry.get("m").batcher)
    control.unload("m")
    world.await_state(("m", "1", UNAVAILABLE))
    # Its thread has said so, and is about to end.
    assert control.close(PATIENCE)
    assert left() is None


def test_files_that_cannot_be_kept(world: World) -> None:
    control = world.start()
    for files in ({"1/a": b"", "1/a/b": b""}, {f"1/{'a' * 300}": b""}):
        with pytest.raises(LoadFailedError, match=r"'sent': the files that were sent cannot be kept \("):
            control.load("sent", ModelConfig(), files)


def test_a_repository_that_cannot_be_read(world: World) -> None:
    control = world.start()
    world.root.rename(world.root.with_name("elsewhere"))
    with pytest.raises(NotReadyError, match="cannot be read"):
        control.without_versions()
    with pytest.raises(NotReadyError, match="cannot be read"):
        control.unload("m")


def test_unload_what_is_not_there(world: World) -> None:
    control = world.start()
    with pytest.raises(NotFoundError, match="failed to unload 'm'"):
        control.unload("m")


def test_models_named_by_their_files_are_not_controlled(world: World) -> None:
    world.write("m", "1")
    path = world.root / "m" / "1" / "model.onnx"
    control = world.start(named=(ModelSource("named", path),))
    assert world.serving("named") == "good"
    for action in (control.load, control.unload):
        with pytest.raises(InvalidRequestError, match="'named' was named on the command line by its file"):
            action("named")


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_control_is_off_by_default(world: World, mode: str) -> None:
    world.write("m", "1")
    control = world.start("*", mode=mode)
    for action in (control.load, control.unload):
        with pytest.raises(
            NotReadyError, match="explicit model load / unload is not allowed if polling is enabled"
        ):
            action("m")


def test_nothing_is_loaded_once_the_server_shuts_down(world: World) -> None:
    world.write("m", "1")
    control = world.start("m")
    assert control.close(PATIENCE)
    with pytest.raises(NotReadyError, match="shutting down"):
        control.load("m")


def test_who_waits_when_the_server_shuts_down_hears_of_it(world: World) -> None:
    world.write("m", "1")
    control = world.start()
    world.hold = threading.Event()
    first = elsewhere(lambda: control.load("m"))
    assert world.holding.wait(PATIENCE)
    world.commands.given.clear()
    second = elsewhere(lambda: control.unload("m"))
    assert world.commands.given.wait(PATIENCE)
    assert not control.close(0.0), "a load cannot be interrupted"
    world.hold.set()
    first.result(PATIENCE)
    with pytest.raises(NotReadyError, match="shutting down"):
        second.result(PATIENCE)


def test_drain_waits_for_those_on_their_way_out(world: World) -> None:
    world.write("m", "1", "slow")
    control = world.start("m")
    model = world.registry.get("m")
    future = model.batcher.submit(np.float32(1))
    control.unload("m")
    assert not control.drain(0.0)
    runner_of[model.batcher].open()
    assert control.drain(float("inf"))
    assert future.done()


def test_polling_says_once_what_cannot_be_read(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.write("m", "1")
    control = world.start("m")
    config = world.root / "m" / "config.pbtxt"

    def complaints_of_two_looks() -> int:
        caplog.clear()
        for _ in range(2):
            control._poll()
        return len([record for record in caplog.records if "cannot be loaded" in record.message])

    config.write_text("max_batch_size: many")
    assert complaints_of_two_looks() == 1
    assert complaints_of_two_looks() == 0
    assert world.serving() == "good"
    config.write_text("")
    assert complaints_of_two_looks() == 0
    config.write_text("max_batch_size: many")
    assert complaints_of_two_looks() == 1


def test_polling_follows_the_repository(world: World) -> None:
    world.write("a", "1")
    world.write("b", "1")
    world.start("*", mode="poll", poll_seconds=0.01)
    world.write("a", "2", "newer")
    world.await_state(("a", "1", UNAVAILABLE), ("a", "2", READY), ("b", "1", READY))
    world.remove("b")
    world.await_state(("a", "1", UNAVAILABLE), ("a", "2", READY), ("b", "1", UNAVAILABLE))
    world.write("c", "1", "broken")
    world.await_state(
        ("a", "1", UNAVAILABLE), ("a", "2", READY), ("b", "1", UNAVAILABLE), ("c", "1", UNAVAILABLE)
    )
    tried = len(world.loads)
    world.write("b", "1", "back")
    world.await_state(("a", "1", UNAVAILABLE), ("a", "2", READY), ("b", "1", READY), ("c", "1", UNAVAILABLE))
    assert world.loads[tried:] == ["b/1: back"], "what is broken is tried again when it has changed"
    world.write("c", "1", "mended")
    world.await_state(("a", "1", UNAVAILABLE), ("a", "2", READY), ("b", "1", READY), ("c", "1", READY))
