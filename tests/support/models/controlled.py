"""Model repository whose files' text scripts how models load, and actions on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from support.models.served_repository import ServedRepository
from support.server.rig import PATIENCE, signature, spec

from tensorferry.batcher import Batcher
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import StartError
from tensorferry.server.models.lifecycle.model import Model


class ScriptedRepository(ServedRepository):
    """Model repository on disk, and a loader that obeys the text of the files.

    `loads` has what was loaded, `runners` what runs it. Loads wait for `hold`, after they have set `holding`.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.loads: list[str] = []
        self.runners: list[ScriptedRunner] = []
        self.hold = threading.Event()
        self.hold.set()
        self.holding = threading.Event()

    def add(self, name: str, version: str, content: str = "good") -> None:
        path = self.root / name / version / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def _load(self, source: ModelSource) -> Model:
        content = source.path.read_text()
        self.loads.append(f"{source.name}/{source.version}: {content}")
        self.holding.set()
        assert self.hold.wait(PATIENCE)
        if content == "a bug":
            raise ZeroDivisionError
        if content == "broken":
            raise StartError(f"{source.path} is broken")
        self.runners.append(ScriptedRunner(gated=content == "slow"))
        batcher = Batcher(self.runners[-1], 4, name=source.name)
        return Model(source.name, source.version, signature(spec("x", "FP32", "b")), 4, content, batcher)

    def serving(self, name: str = "m", version: str = "") -> str:
        """Return the text of the file of the version that serves."""
        return self.registry.get(name, version).batching

    def close(self) -> None:
        self.hold.set()
        for runner in self.runners:
            runner.open()
        super().close()


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
