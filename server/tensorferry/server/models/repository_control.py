"""Control of the models in the repositories: loading at startup, on request, and when files change.

One thread loads and unloads, one model at a time; models that steps of another name come before it. A new version is loaded and warmed up while the old one serves. Then
requests go to the new one, and the old one answers those that it has accepted. A version that cannot be loaded does not
affect the versions that serve.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tensorferry.batcher.supervision import RestartBackoff, supervise
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import PYTHON_SUFFIX, ModelSource
from tensorferry.server.errors import (
    InvalidRequestError,
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    StartError,
)
from tensorferry.server.model_config.ensembles import is_ensemble
from tensorferry.server.models.declared_sources import declared_source, named_steps
from tensorferry.server.models.public_reasons import without_paths
from tensorferry.server.models.registry import Model, ModelRegistry, ModelState
from tensorferry.server.models.repository import Repository, ServedVersion
from tensorferry.server.models.unloading import ModelUnloader
from tensorferry.server.models.uploaded_files import UploadedFiles

_log = logging.getLogger("tensorferry.server")

# Of files that the interpreter imports.
_CODE_SUFFIXES = frozenset((".py", ".pyc", ".pyw"))

_Command: TypeAlias = Callable[[], None]


def _shutting_down() -> NotReadyError:
    return NotReadyError("the server is shutting down and loads no more models")


class _Sent(NamedTuple):
    """What a client sent with a load request, in place of the repository's."""

    config: ModelConfig | None = None
    files: UploadedFiles | None = None


_NOTHING_SENT = _Sent()


class _Update(NamedTuple):
    """How a model is updated. A version that failed to load before, and has not changed, is tried only if `again`.

    `users` are the models for whose steps it is loaded. `with_steps` says whether the models that its own steps name are
    loaded before it.
    """

    sent: _Sent = _NOTHING_SENT
    again: bool = False
    users: tuple[str, ...] = ()
    with_steps: bool = True


_SCAN = _Update()


class RepositoryController:
    """Loads and unloads models. Call `start` once, then `close`; other methods are thread-safe.

    `load` loads a model from a source, or raises StartError. `changed` is called with a model's name when it starts or
    stops serving.
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
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._load = load
        self._changed = changed
        self._mode = mode
        self._poll_seconds = poll_seconds
        # Models that the command line names by their files. Repositories do not change them.
        self._named: frozenset[str] = frozenset()
        # Fingerprints of loaded versions and of those that failed to load, by name and version. Used only by the loading
        # thread, or by the starting thread before it exists.
        self._loaded: dict[str, dict[str, Hashable]] = {}
        self._failed: dict[str, dict[str, Hashable]] = {}
        # The models that steps of each model name, since its last load; those that were loaded only for such steps; and what
        # a client sent in place of the repository's files. For the same threads.
        self._steps: dict[str, Sequence[str]] = {}
        self._loaded_for_steps: set[str] = set()
        self._sent: dict[str, _Sent] = {}
        # Reasons why the versions of a model are unknown. The loading thread replaces the mapping; all threads read it.
        self._unreadable: Mapping[str, str] = {}
        self._unloader = ModelUnloader(registry, changed)
        # Guards _thread and _closed. No loading or waiting while it is held.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._backoff = RestartBackoff()
        # Commands with the future of their caller; None ends the thread.
        self._commands: queue.SimpleQueue[tuple[_Command, Future[None]] | None] = queue.SimpleQueue()

    def start(self, named: Sequence[ModelSource], names: Sequence[str], *, strict: bool) -> None:
        """Load the models served from the start: the named sources, and repository models by name.

        "*" means all models of the repositories. StartError for the first source that fails and, if `strict`, for the
        first model of the repositories that fails.
        """
        self._named = frozenset(source.name for source in named)
        if "*" in names:
            names = self._repository.names()
            for reason in self._repository.empty_roots():
                _log.error("%s", reason)
        for source in named:
            self._registry.mark_loading(source.name, source.version)
        for name in names:
            if name in self._named:
                raise StartError(
                    f"model {name!r} is named on the command line and is in the model repository too; rename one"
                )
        for source in named:
            if problem := self._update_steps(source, _SCAN):
                raise problem
            self._registry.mark_ready(self._load(source))
            self._changed(source.name)
        for name in names:
            try:
                self._update_model(name)
                self._loaded_for_steps.discard(name)
            except NotFoundError as error:
                raise StartError(f"--load-model: {error}") from None
            except LoadFailedError as error:
                if strict:
                    raise StartError(f"{error} (--exit-on-error false serves the other models)") from error
        with self._lock:
            if not self._closed and self._mode != "none":
                self._thread = threading.Thread(target=self._run, name="model-control", daemon=True)
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
        self._await(lambda: self._unload_all_versions(name, dependents=dependents))

    def models_without_versions(self) -> Mapping[str, str]:
        """Return the repository models without a known version, with the reason; "" if a model was never used.

        A model whose versions are all unloaded is included if its files are no longer readable. NotReadyError if a
        repository cannot be read.
        """
        entries, unreadable = self._registry.entries(), self._unreadable
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
            raise NotReadyError(self.public_reason(str(error))) from None

    def public_reason(self, reason: str) -> str:
        """Return the reason without paths of the server, for callers that may not control models."""
        return without_paths(reason, self._repository.roots)

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
        return ended and not thread.is_alive()

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
        supervise(self._run_until_closed, self._log_crash, self._backoff)

    def _log_crash(self, fault: BaseException) -> None:
        _log.error("the thread that loads models crashed (bug); it is restarted", exc_info=fault)

    def _run_until_closed(self) -> None:
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
            names = set(self._repository.names())
        except StartError as error:
            _log.warning("%s; the loaded models do not change", error)
            return
        for name in sorted(names | self._loaded.keys()):
            if self._closed:
                return
            if name in self._named:
                continue
            try:
                if name in names:
                    self._update_model(name)
                else:
                    self._unload(name, list(self._loaded[name]))
            except LoadFailedError:
                pass
            except NotFoundError:
                # Removed since it was listed. The next poll unloads it.
                pass
            except BaseException:
                _log.exception(
                    "model %s could not be updated from its repository (bug in tensorferry.server); polling continues",
                    name,
                )

    def _load_on_request(self, name: str, config: ModelConfig | None, files: Mapping[str, bytes]) -> None:
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
        self._update_model(name, _Update(_Sent(config, uploaded), again=True))
        self._loaded_for_steps.discard(name)

    def _update_model(self, name: str, update: _Update = _SCAN) -> None:
        """Load the new and changed versions of a model, then unload the versions that are no longer served.

        NotFoundError if there is no such model, LoadFailedError if a version cannot be loaded.
        """
        sent = update.sent
        self._check_not_named(name)
        repository = self._repository if sent.files is None else Repository([sent.files.directory])
        try:
            versions = repository.versions(name, sent.config)
        except StartError as error:
            if update.again or self._unreadable.get(name) != str(error):
                # Polling reports the same error only once.
                self._report_failure(name, "", error)
            self._unreadable = {**self._unreadable, name: str(error)}
            raise LoadFailedError(f"load failed for model {name!r}: {error}") from None
        self._forget_unreadable(name)
        if not versions:
            raise NotFoundError(
                f"failed to load {name!r}, failed to poll from model repository: no directory of that name is in "
                f"{', '.join(map(str, repository.roots))}"
            )
        selected = {version.source.version for version in versions}
        outgoing = [version for version in self._loaded.get(name, ()) if version not in selected]
        before = dict(self._loaded.get(name, {}))
        failures = [
            failure for version in versions if (failure := self._load_version(version, update, outgoing))
        ]
        if failures:
            if sent != _NOTHING_SENT and not self._loaded.get(name):
                # It is not tried again, because what was sent is not kept.
                self._steps.pop(name, None)
            # The outgoing versions continue to serve, because their replacement is missing.
            raise LoadFailedError(f"load failed for model {name!r}: {'; '.join(failures)}")
        self._sent[name] = sent
        self._unload(name, outgoing)
        if self._loaded.get(name) != before:
            self._update_users(name, update.users)

    def _update_steps(self, source: ModelSource, update: _Update) -> StartError | None:
        """Load the models that steps of a model name; return the error if one of them does not serve."""
        name, steps = source.name, named_steps(source)
        self._steps[name] = steps
        users = (*update.users, name)
        for step in steps:
            if step in users or any(user.name == step for user in self._registry.users(name)):
                return StartError(f"circular dependency between ensembles: {' -> '.join((*users, step))}")
            reason = None
            if update.with_steps and step not in self._named:
                known = bool(self._loaded.get(step))
                try:
                    self._update_model(
                        step, _Update(self._sent.get(step, _NOTHING_SENT), update.again, users)
                    )
                except (LoadFailedError, NotFoundError) as error:
                    reason = error
                if not known and self._loaded.get(step):
                    self._loaded_for_steps.add(step)
            if self._registry.serves(step):
                continue
            if reason is None or isinstance(reason, NotFoundError):
                return StartError(
                    f"ensemble {name} contains models that are not available or ambiguous: {step}; put it into the model "
                    "repository, or name a model that the server has"
                )
            return StartError(
                f"ensemble {name!r} depends on {step!r} which has no loaded version. Model {step!r} loading failed with error: "
                f"{reason}"
            )
        return None

    def _update_users(self, name: str, users: tuple[str, ...]) -> None:
        """Load models again whose steps name this one, if it has changed for them, or if they failed to load before."""
        for user in [user for user, steps in self._steps.items() if name in steps and user not in users]:
            update = _Update(self._sent.get(user, _NOTHING_SENT), with_steps=False)
            try:
                self._update_model(user, update)
            except (LoadFailedError, NotFoundError) as error:
                _log.debug("model %s is still not loaded after a change of model %s: %s", user, name, error)

    def _versions_of_steps(self, name: str) -> Hashable:
        """Return what is loaded of the models that steps of a model name."""
        return tuple((step, tuple(self._loaded.get(step, {}).items())) for step in self._steps.get(name, ()))

    def _forget_unreadable(self, name: str) -> None:
        if name in self._unreadable:
            self._unreadable = {other: why for other, why in self._unreadable.items() if other != name}

    def _load_version(self, version: ServedVersion, update: _Update, outgoing: Sequence[str]) -> str | None:
        """Load a version if it has changed or was uploaded; return the failure, if any.

        The log names the versions that it replaces, including those `outgoing`.
        """
        uploaded = update.sent.files
        source = replace(version.source, keep_alive=uploaded)
        # Files of another upload are never equal to these.
        fingerprint: Hashable = version.fingerprint if uploaded is None else (uploaded, version.fingerprint)
        name, number = source.name, source.version
        loaded, failed = self._loaded.setdefault(name, {}), self._failed.setdefault(name, {})
        ensemble = is_ensemble(source.config)
        # Even if an ensemble has not changed, its models may have.
        problem = self._update_steps(source, update) if ensemble else None
        if loaded.get(number) == fingerprint and not self._registry.is_outdated(name, number):
            return f"version {number} is at UNAVAILABLE state: {problem}" if problem else None
        if failed.get(number) == (fingerprint, self._versions_of_steps(name)) and not update.again:
            return f"version {number} could not be loaded, and has not changed since"
        self._registry.mark_loading(name, number)
        try:
            if not ensemble:
                if uploaded is not None and source.path.suffix == PYTHON_SUFFIX:
                    raise StartError(f"{source.path.name} is Python code, which a client cannot send")
                source = declared_source(source)
                problem = self._update_steps(source, update)
            if problem is not None:
                raise problem
            model = self._load(source)
        except StartError as error:
            # An upload that failed is not kept.
            failed[number] = (fingerprint if uploaded is None else object(), self._versions_of_steps(name))
            self._report_failure(name, number, error)
            return f"version {number} is at UNAVAILABLE state: {error}"
        except BaseException:
            self._registry.mark_failed(
                name, number, "internal error while it was loaded; see the server's log"
            )
            raise
        failed.pop(number, None)
        loaded[number] = fingerprint
        replaced = self._registry.mark_ready(model)
        self._changed(name)
        if replaced is not None:
            self._unloader.unload(replaced)
        if replaced is not None or outgoing:
            before = [*(f"version {one}" for one in outgoing), *(["its previous files"] if replaced else [])]
            _log.info("model %s version %s serves now, in place of %s", name, number, " and ".join(before))
        return None

    def _report_failure(self, name: str, version: str, error: StartError) -> None:
        if version:
            self._registry.mark_failed(name, version, str(error), self.public_reason(str(error)))
        serves = "; the loaded version continues to serve" if self._registry.serves(name) else ""
        _log.error("model %s version %s cannot be loaded: %s%s", name, version or "?", error, serves)
        self._changed(name)

    def _check_not_named(self, name: str) -> None:
        if name in self._named:
            raise InvalidRequestError(
                f"model {name!r} was named on the command line by its file, and is not in a model repository"
            )

    def _unload_all_versions(self, name: str, *, dependents: bool) -> None:
        self._check_not_named(name)
        if name not in self._loaded and name not in self._names():
            raise NotFoundError(
                f"failed to unload {name!r}: no model of that name is loaded, or in the repository"
            )
        self._forget_unreadable(name)
        steps = self._steps.get(name, ())
        self._unload(name, list(self._loaded.get(name, ())))
        for step in steps if dependents else ():
            needed = any(step in others for user, others in self._steps.items() if self._loaded.get(user))
            if step in self._loaded_for_steps and not needed:
                self._unload_all_versions(step, dependents=True)

    def _unload(self, name: str, versions: Sequence[str]) -> None:
        for entry in self._registry.entries():
            if entry.name == name and entry.version in versions and entry.model is not None:
                self._registry.mark_unloading(entry.model)
                _log.info("model %s version %s is being unloaded", name, entry.version)
                self._changed(name)
                self._unloader.unload(entry.model)
        for version in versions:
            self._loaded[name].pop(version, None)
        if not self._loaded.get(name):
            for known in (self._loaded, self._steps, self._sent):
                known.pop(name, None)
            self._loaded_for_steps.discard(name)
