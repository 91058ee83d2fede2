"""Model repository on disk with a controller; the text of a model's file scripts how it loads."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from support.server.rig import PATIENCE, signature, spec

from tensorferry.batcher import Batcher, Pipeline
from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import (
    StartError,
)
from tensorferry.server.models.lifecycle.registry import Model, ModelRegistry, ModelState
from tensorferry.server.models.repository.repository import Repository
from tensorferry.server.models.repository.repository_control import RepositoryController


class Commands(queue.SimpleQueue[Any]):
    """Queue of commands with an event that is set by the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.given = threading.Event()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self.given.set()


class ScriptedRepository:
    """Model repository on disk, and a loader that obeys the text of the files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.registry = ModelRegistry()
        self.loads: list[str] = []
        self.changed: list[str] = []
        self.configs: list[ModelConfig | None] = []
        # Guards changed; notified when a model changes.
        self._changed = threading.Condition()
        self.hold: threading.Event | None = None
        self.holding = threading.Event()
        self.commands = Commands()
        self.control: RepositoryController

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
        with self._changed:
            self.changed.append(name)
            self._changed.notify_all()

    def await_state(self, *states: tuple[str, str, ModelState]) -> None:
        """Wait until the versions and their states equal these."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.states() == list(states), PATIENCE), self.states()

    def states(self) -> list[tuple[str, str, ModelState]]:
        return [(entry.name, entry.version, entry.state) for entry in self.registry.entries()]

    def serving(self, name: str = "m", version: str = "") -> str:
        """Return the text of the file of the version that serves."""
        return self.registry.get(name, version).batching

    def start(
        self,
        *names: str,
        mode: str = "explicit",
        named: tuple[ModelSource, ...] = (),
        strict: bool = True,
        poll_seconds: float = 3600.0,
        backoff: RestartBackoff | None = None,
    ) -> RepositoryController:
        self.control = RepositoryController(
            self.registry, Repository([self.root]), self.load, self.note, mode=mode, poll_seconds=poll_seconds
        )
        self.control._commands = self.commands
        if backoff is not None:
            self.control._backoff = backoff
        self.control.start(named, names, strict=strict)
        return self.control

    def close(self) -> None:
        for runner in list(runner_of.values()):
            runner.open()
        if self.hold is not None:
            self.hold.set()
        assert self.control.close(PATIENCE), "a thread did not end"
        for model in self.registry.models():
            assert model.batcher.close()


runner_of: weakref.WeakKeyDictionary[Batcher | Pipeline, ScriptedRunner] = weakref.WeakKeyDictionary()


def run_in_thread(action: Callable[[], Any]) -> Future[Any]:
    """Run the action on a new thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
