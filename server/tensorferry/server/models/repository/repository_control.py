"""Control of the models in the repositories: loading at startup, on request, and when files change.

One thread loads and unloads, one model at a time; models that steps of another name come before it. A new version is loaded and checked while the old one serves. Then
requests go to the new one, and the old one answers those that it has accepted. A version that cannot be loaded does not
affect the versions that serve.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeAlias

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import (
    InvalidRequestError,
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    StartError,
)
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry, ModelState
from tensorferry.server.models.lifecycle.unloading import ModelUnloader
from tensorferry.server.models.repository.model_updates import ModelUpdater, Sent, Update, UploadedFiles
from tensorferry.server.models.repository.repository import Repository
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

# Of files that the interpreter imports.
_CODE_SUFFIXES = frozenset((".py", ".pyc", ".pyw"))

_Command: TypeAlias = Callable[[], None]


def _shutting_down() -> NotReadyError:
    return NotReadyError("the server is shutting down and loads no more models")


class RepositoryController:
    """Loads and unloads models. Call `start` once, then `close`; other methods are thread-safe.

    `load` loads a model from a source, or raises StartError. `changed` is called with a model's name when it starts or
    stops serving. Sequences of a model that is replaced or unloaded may go on for `sequence_seconds`.
    `loading` is entered while a model's file is imported.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        repository: Repository,
        load: Callable[[ModelSource], Model],
        changed: Callable[[str], None],
        *,
        mode: str,
        poll_seconds: float,
        sequence_seconds: float = 0.0,
        loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._changed = changed
        self._mode = mode
        self._poll_seconds = poll_seconds
        self._unloader = ModelUnloader(registry, changed, sequence_seconds)
        # Used only by the loading thread, or by the starting thread before it exists.
        self._updates = ModelUpdater(registry, repository, load, changed, self._unloader, loading)
        # Guards _thread and _closed. No loading or waiting while it is held.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._backoff = RestartBackoff()
        # Commands with the future of their caller; None ends the thread.
        self._commands: queue.SimpleQueue[tuple[_Command, Future[None]] | None] = queue.SimpleQueue()

    def start(self, named: Sequence[ModelSource], names: Sequence[str], *, strict: bool) -> None:
        """Load the models served from the start: the named sources, and repository models by name.

        "*" means all models of the repositories. StartError for the first source that fails and, if `strict`, for all
        models of the repositories that fail.
        """
        self._updates.named = frozenset(source.name for source in named)
        self._repository.refresh()
        if "*" in names:
            names = self._repository.names()
            for reason in self._repository.empty_roots():
                _log.error("%s", reason)
        for source in named:
            self._registry.mark_loading(source.name, source.version)
        for name in names:
            if name in self._updates.named:
                raise StartError(
                    f"model {name!r} is named on the command line and is in the model repository too; rename one"
                )
        for source in named:
            self._updates.load_named(source)
        failed = []
        for name in names:
            try:
                self._updates.update(name)
                self._updates.keep(name)
            except NotFoundError as error:
                raise StartError(f"--load-model: {error}") from None
            except LoadFailedError as error:
                failed.append(str(error))
        if strict and failed:
            raise StartError("\n".join(failed) + " (--exit-on-error false serves the other models)")
        with self._lock:
            if not self._closed and self._mode != "none":
                self._thread = new_thread(
                    "model-control", self._run, ThreadKind.RESTARTED, backoff=self._backoff
                )
                self._thread.start()

    def load(
        self, name: str, config: ModelConfig | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load the new and changed versions of a model; return when they are ready.

        `config` replaces its configuration file. `files` replace the repository's files; their keys are paths relative to
        the model's directory. NotFoundError if there is no such model, LoadFailedError if it cannot be loaded,
        NotReadyError if models cannot be controlled.
        """
        self._await(lambda: self._load_on_request(name, config, files or {}))

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Stop accepting requests for a model, and unload it after it has answered those that it has accepted.

        With `dependents`, the models that were loaded for its steps are unloaded too, unless others need them. NotFoundError
        if there is no such model, NotReadyError if models cannot be controlled.
        """
        self._await(lambda: self._unload_on_request(name, dependents))

    def replace(self, before: Model, model: Model) -> bool:
        """Let another load of the same version serve in place of `before`; return False if that does not serve."""
        if not self._registry.replace(before, model):
            return False
        self._changed(model.name)
        self._unloader.unload(before)
        return True

    def models_without_versions(self) -> Mapping[str, str]:
        """Return the repository models without a known version, with the reason; "" if a model was never used.

        A model whose versions are all unloaded is included if its files are no longer readable. NotReadyError if a
        repository cannot be read.
        """
        entries, unreadable = self._registry.entries(), self._updates.unreadable
        known = {entry.name for entry in entries}
        alive = {entry.name for entry in entries if entry.state is not ModelState.UNAVAILABLE}
        return {
            name: unreadable.get(name, "")
            for name in self._names()
            if name not in known or (name in unreadable and name not in alive)
        }

    def _names(self) -> Sequence[str]:
        """Return the models in the repositories; raise NotReadyError for clients if a repository cannot be read."""
        try:
            return self._repository.names()
        except StartError as error:
            raise NotReadyError(self._registry.public_reason(str(error))) from None

    def outgoing_models(self) -> Sequence[Model]:
        """Return the unloaded and replaced models that may still have requests."""
        return self._unloader.models()

    def drain(self, until: float) -> bool:
        """Wait for unloaded and replaced models to answer their requests, until a monotonic time; return if all have."""
        return self._unloader.drain(until)

    def close(self, timeout: float) -> bool:
        """End the thread and all models that are being unloaded; return whether this succeeded in time."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._backoff.end()
        self._commands.put(None)
        until = time.monotonic() + timeout
        ended = self._unloader.close(until)
        if thread is None:
            return ended
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            return False
        self._updates.forget()
        return ended

    def _await(self, command: _Command) -> None:
        if self._mode != "explicit":
            raise NotReadyError(
                "explicit model load / unload is not allowed if polling is enabled, or the repository is not "
                f"controlled at all: --model-control is {self._mode!r}, it must be 'explicit'"
            )
        done: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise _shutting_down()
            if self._thread is None:
                raise NotReadyError("the server is starting; load and unload models when it is ready")
            self._commands.put((command, done))
        done.result()

    def _run(self) -> None:
        while True:
            try:
                given = self._commands.get(timeout=self._poll_seconds if self._mode == "poll" else None)
            except queue.Empty:
                self._poll()
                continue
            if given is None:
                break
            command, done = given
            try:
                if self._closed:
                    raise _shutting_down()
                command()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            # An idle thread must not keep references to the files or models of the last command.
            del command, done, given
        while not self._commands.empty():
            if (late := self._commands.get()) is not None:
                late[1].set_exception(_shutting_down())

    def _poll(self) -> None:
        try:
            self._repository.refresh()
            names = set(self._repository.names())
        except StartError as error:
            _log.warning("%s; the loaded models do not change", error)
            return
        for name in sorted(names | self._updates.loaded_names):
            if self._closed:
                return
            if name in self._updates.named:
                continue
            try:
                if name in names:
                    self._updates.update(name)
                else:
                    self._updates.unload(name)
            except (LoadFailedError, NotFoundError):
                # The first was logged. A model that was removed since it was listed is unloaded by the next poll.
                pass
            except BaseException:
                _log.exception(
                    "model %s could not be updated from its repository (bug in tensorferry.server); polling continues",
                    name,
                )

    def _load_on_request(self, name: str, config: ModelConfig | None, files: Mapping[str, bytes]) -> None:
        self._check_not_named(name)
        try:
            # So that the load finds what is new in repositories elsewhere.
            self._repository.refresh()
        except StartError as error:
            raise LoadFailedError(f"load failed for model {name!r}: {error}") from None
        uploaded = None
        for file in files:
            if Path(file).suffix.lower() in _CODE_SUFFIXES:
                raise InvalidRequestError(
                    f"the file {file!r} of the request is Python code, which clients cannot send, because it would run in the "
                    "server; let the operator put it into the model repository"
                )
        if files:
            try:
                uploaded = UploadedFiles(name, files)
            except OSError as error:
                raise LoadFailedError(
                    f"load failed for model {name!r}: the uploaded files cannot be stored ({error.strerror}): give "
                    "them consistent names, or make room in the server's TMPDIR"
                ) from None
        self._updates.update(name, Update(Sent(config, uploaded), again=True))
        self._updates.keep(name)

    def _unload_on_request(self, name: str, dependents: bool) -> None:
        self._check_not_named(name)
        if name not in self._updates.loaded_names and name not in self._names():
            raise NotFoundError(
                f"failed to unload {name!r}: no model of that name is loaded, or in the repository"
            )
        self._updates.unload(name, dependents=dependents)

    def _check_not_named(self, name: str) -> None:
        if name in self._updates.named:
            raise InvalidRequestError(
                f"model {name!r} was named on the command line by its file, and is not in a model repository"
            )
