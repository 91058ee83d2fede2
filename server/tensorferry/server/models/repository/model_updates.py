"""Loading and unloading of models as the files of a repository say, and of models that steps of others name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import LoadFailedError, NotFoundError, StartError
from tensorferry.server.models.config_pbtxt.ensembles import is_ensemble
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.models.lifecycle.unloading import ModelUnloader
from tensorferry.server.models.repository.declared_sources import declared_source, named_steps
from tensorferry.server.models.repository.repository import Repository, ServedVersion
from tensorferry.server.system.scratch_directory import ScratchDirectory

_log = logging.getLogger("tensorferry.server")


class UploadedFiles:
    """A model's files in a temporary directory, which is deleted with this object. OSError if they cannot be stored.

    The keys of `files` are paths relative to the model's directory.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self._scratch = ScratchDirectory()
        self.directory = self._scratch.path
        for file, content in files.items():
            path = self.directory / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


class Sent(NamedTuple):
    """What a client sent with a load request, in place of the repository's."""

    config: ModelConfig | None = None
    files: UploadedFiles | None = None


_NOTHING_SENT = Sent()


class Update(NamedTuple):
    """How a model is updated. A version that failed to load before, and has not changed, is tried only if `again`.

    `users` are the models for whose steps it is loaded. `with_steps` says whether the models that its own steps name are
    loaded before it; those in `updated` were, for other steps.
    """

    sent: Sent = _NOTHING_SENT
    again: bool = False
    users: tuple[str, ...] = ()
    with_steps: bool = True
    updated: set[str] | None = None


_SCAN = Update()

# Each ensemble's steps may be ensembles. More levels than anyone needs.
_MOST_NESTED = 8


class ModelUpdater:
    """Compares models with their files, and loads and unloads their versions. One thread at a time may use it.

    `named` are the models that the command line names by their files; repositories do not change them. Any thread may read
    `unreadable`: reasons why the versions of a model are unknown. Other arguments are those of `RepositoryController`.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        repository: Repository,
        load: Callable[[ModelSource], Model],
        changed: Callable[[str], None],
        unloader: ModelUnloader,
        loading: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._load = load
        self._changed = changed
        self._unloader = unloader
        self._loading = loading
        self.named: frozenset[str] = frozenset()
        # Replaced, never changed.
        self.unreadable: Mapping[str, str] = {}
        # Fingerprints of loaded versions and of those that failed to load, by name and version.
        self._loaded: dict[str, dict[str, Hashable]] = {}
        self._failed: dict[str, dict[str, Hashable]] = {}
        # The models that steps of each model name: of its last load, and of later ones that failed.
        self._steps: dict[str, Sequence[str]] = {}
        # The models that were loaded only for such steps.
        self._loaded_for_steps: set[str] = set()
        # What a client sent in place of the repository's files.
        self._sent: dict[str, Sent] = {}

    @property
    def loaded_names(self) -> Set[str]:
        """Return the models that are loaded, or failed to load."""
        return self._loaded.keys()

    def load_named(self, source: ModelSource) -> None:
        """Load a model that the command line names, after the models of repositories that its steps name. StartError."""
        if problem := self._update_steps(source, _SCAN):
            raise problem
        self._registry.mark_ready(self._load(source))
        self._changed(source.name)

    def forget(self) -> None:
        """Forget all models, so that files that clients sent are deleted with the last model that uses them."""
        for known in (self._loaded, self._failed, self._steps, self._sent):
            known.clear()

    def keep(self, name: str) -> None:
        """Note that a model was asked for by itself, so it stays if no other needs it any more."""
        self._loaded_for_steps.discard(name)

    def update(self, name: str, update: Update = _SCAN) -> None:
        """Load the new and changed versions of a model, then unload the versions that are no longer served.

        NotFoundError if there is no such model, LoadFailedError if a version cannot be loaded.
        """
        sent = update.sent
        repository = self._repository if sent.files is None else Repository([sent.files.directory])
        try:
            versions = repository.versions(name, sent.config)
        except StartError as error:
            if update.again or self.unreadable.get(name) != str(error):
                # Polling reports the same error only once.
                self._report_failure(name, "", error)
            self.unreadable = {**self.unreadable, name: str(error)}
            raise LoadFailedError(f"load failed for model {name!r}: {error}") from None
        self._forget_unreadable(name)
        if not versions:
            raise NotFoundError(
                f"failed to load {name!r}, failed to poll from model repository: no directory of that name is in "
                f"{', '.join(map(str, repository.roots))}"
            )
        selected = {version.source.version for version in versions}
        outgoing = [version for version in self._loaded.get(name, ()) if version not in selected]
        before, steps_before = dict(self._loaded.get(name, {})), self._steps.get(name, ())
        failures = [
            failure for version in versions if (failure := self._load_version(version, update, outgoing))
        ]
        if not failures:
            # Otherwise the outgoing versions continue to serve, because their replacement is missing.
            self._unload(name, selected)
        changed = self._loaded.get(name) != before
        if changed or not failures:
            # Also if only some versions serve with what was sent.
            self._sent[name] = sent
        elif sent != _NOTHING_SENT:
            # It is not tried again, because what was sent is not kept.
            self._steps[name] = steps_before
        if changed:
            self._update_users(name, update.users)
        if failures:
            raise LoadFailedError(f"load failed for model {name!r}: {'; '.join(failures)}")

    def _update_steps(self, source: ModelSource, update: Update) -> StartError | None:
        """Load the models that steps of a model name; return the error if one of them does not serve."""
        name, steps = source.name, named_steps(source)
        # Both, because a version that serves goes on if this one fails.
        self._steps[name] = list(dict.fromkeys([*self._steps.get(name, ()), *steps]))
        users = (*update.users, name)
        if steps and len(users) > _MOST_NESTED:
            return _too_deep(users[0])
        # Shared by all updates below the first.
        updated = set[str]() if update.updated is None else update.updated
        for step in steps:
            if step in users or any(user.name == step for user in self._registry.users(name)):
                return StartError(f"circular dependency between ensembles: {' -> '.join((*users, step))}")
            reason = None
            if update.with_steps and step not in self.named and step not in updated:
                updated.add(step)
                known = bool(self._loaded.get(step))
                try:
                    sent = self._sent.get(step, _NOTHING_SENT)
                    self.update(step, Update(sent, update.again, users, updated=updated))
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
        return _too_deep(name) if self._levels(steps) > _MOST_NESTED else None

    def _levels(self, steps: Sequence[str]) -> int:
        """Return how many levels of loaded models these are: themselves, those that their steps name, and so on."""
        models = self._registry.models()
        levels, names = 0, set(steps)
        while names and levels <= _MOST_NESTED:
            levels += 1
            names = {used.name for model in models if model.name in names for used in model.uses}
        return levels

    def _update_users(self, name: str, users: tuple[str, ...]) -> None:
        """Load models again whose steps name this one, if it has changed for them, or if they failed to load before."""
        done = {*users, *self.named}
        for user in [user for user, steps in self._steps.items() if name in steps and user not in done]:
            update = Update(self._sent.get(user, _NOTHING_SENT), with_steps=False)
            try:
                self.update(user, update)
            except (LoadFailedError, NotFoundError) as error:
                _log.debug("model %s is still not loaded after a change of model %s: %s", user, name, error)

    def _versions_of_steps(self, name: str) -> Hashable:
        """Return what is loaded of the models that steps of a model name."""
        return tuple((step, tuple(self._loaded.get(step, {}).items())) for step in self._steps.get(name, ()))

    def _forget_unreadable(self, name: str) -> None:
        if name in self.unreadable:
            self.unreadable = {other: why for other, why in self.unreadable.items() if other != name}

    def _load_version(self, version: ServedVersion, update: Update, outgoing: Sequence[str]) -> str | None:
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
            if problem is not None:
                return f"version {number} is at UNAVAILABLE state: {problem}"
            # A client that asks for one whose devices have failed gets another, or the reason.
            if not update.again or self._registry.serves(name, number):
                return None
        if failed.get(number) == (fingerprint, self._versions_of_steps(name)) and not update.again:
            return f"version {number} could not be loaded, and has not changed since"
        self._registry.mark_loading(name, number)
        try:
            if not ensemble:
                with self._loading():
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
        self._steps[name] = named_steps(source)
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
            self._registry.mark_failed(name, version, str(error))
        serves = "; the loaded version continues to serve" if self._registry.serves(name) else ""
        _log.error("model %s version %s cannot be loaded: %s%s", name, version or "?", error, serves)
        self._changed(name)

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload all versions of a model; with `dependents` also the models that were loaded for its steps alone."""
        self._forget_unreadable(name)
        steps = self._steps.get(name, ())
        self._unload(name)
        for step in steps if dependents else ():
            users = [user for user in self._steps if user in self.named or self._loaded.get(user)]
            needed = any(step in self._steps[user] for user in users)
            if step in self._loaded_for_steps and not needed:
                self.unload(step, dependents=True)

    def _unload(self, name: str, kept: Set[str] = frozenset()) -> None:
        """Unload the loaded versions of a model, and forget those that failed to load, except those that are `kept`."""
        loaded, failed = self._loaded.get(name, {}), self._failed.get(name, {})
        for entry in self._registry.entries():
            version = entry.version
            if entry.name != name or version in kept:
                continue
            failed.pop(version, None)
            if loaded.pop(version, None) is not None and entry.model is not None:
                model = self._registry.mark_unloading(entry.model)
                _log.info("model %s version %s is being unloaded", name, version)
                self._changed(name)
                self._unloader.unload(model)
            elif self._registry.forget_failure(name, version):
                self._changed(name)
        if not loaded:
            for known in (self._loaded, self._failed, self._steps, self._sent):
                known.pop(name, None)
            self._loaded_for_steps.discard(name)


def _too_deep(name: str) -> StartError:
    return StartError(
        f"steps of ensemble {name!r} are ensembles, whose steps are ensembles, and so on for more than {_MOST_NESTED} levels, "
        "which this server does not allow: join some of them"
    )
