"""Registry of the server's models: lifecycle, and look-up by name and version."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tensorferry.batcher import StatefulBatcher
from tensorferry.server.errors import InvalidRequestError, NotFoundError, NotReadyError
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.public_reasons import without_paths
from tensorferry.server.python.steps.named_model import ModelReference
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth

_UNLOADED = "unloaded"


class ModelState(enum.Enum):
    """LOADING → READY → UNLOADING → UNAVAILABLE. Only READY accepts requests.

    If the devices of a version fail, or a model that its steps name is not READY, it is UNAVAILABLE, with its model, until
    they work again.
    """

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """The state of a version, its model while it is loaded, and the reason if it is unavailable.

    `after` is the entry that follows an unloading one, if the version is loaded again meanwhile.
    """

    name: str
    version: str
    state: ModelState
    model: Model | None = None
    reason: str = ""
    after: RegistryEntry | None = None

    @property
    def is_unloaded(self) -> bool:
        """Whether the version was unloaded on request or replaced."""
        return self.model is None and self.reason == _UNLOADED


class ModelRegistry:
    """Models by name and version. Every method is thread-safe.

    `may_be_empty` says whether a server without models is ready, because clients may load some later. `roots` are the
    directories of the model repositories, which public reasons do not show.
    """

    def __init__(self, *, may_be_empty: bool = True, roots: Sequence[Path] = ()) -> None:
        self._may_be_empty = may_be_empty
        self._roots = roots
        # Guards _entries, generation and only_model. Held only for look-ups and updates, which may read a model's health.
        # Models are loaded and closed without it. The last two, and `retired`, are also read without it.
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, RegistryEntry]] = {}
        # Increases when an entry changes, so that callers can detect stale look-ups.
        self.generation = 0
        # The loaded model, ready or unloading; None if there are several, or none.
        self.only_model: Model | None = None
        # Models that serve no more, but go on with the sequences that live.
        self.retired: tuple[Model, ...] = ()
        # Whether every model that is served from the start was loaded, or failed to load.
        self.complete = False

    def mark_complete(self) -> None:
        """Record that the models served from the start were all tried."""
        self.complete = True

    def mark_loading(self, name: str, version: str) -> None:
        """Record that a version is being loaded. If it is ready, it serves until it is replaced."""
        with self._lock:
            broken = self._failed_model_locked(name, version)
            self._put_unless_it_runs_locked(RegistryEntry(name, version, ModelState.LOADING, broken))

    def mark_ready(self, model: Model) -> Model | None:
        """Let a version accept requests. Returns the model that it replaces, if the caller is to unload that."""
        with self._lock:
            entry = self._entries.get(model.name, {}).get(model.version)
            before = None if entry is None or entry.state is ModelState.UNLOADING else entry.model
            self._retire_locked(before)
            self._put_loaded_locked(model)
        return before

    def replace(self, before: Model, model: Model) -> bool:
        """Let a model serve in place of `before`; return False if that is not the one that serves."""
        with self._lock:
            entry = self._entries.get(before.name, {}).get(before.version)
            if entry is None or entry.model is not before or entry.state is not ModelState.READY:
                return False
            self._retire_locked(before)
            self._put_loaded_locked(model)
        return True

    def mark_failed(self, name: str, version: str, reason: str) -> None:
        """Record that a version could not be loaded. If it is ready, it continues to serve."""
        with self._lock:
            broken = self._failed_model_locked(name, version)
            if broken is not None and self._entry_of_locked(broken).state is ModelState.READY:
                # What its steps need was loaded meanwhile.
                self._put_loaded_locked(broken)
                return
            entry = RegistryEntry(name, version, ModelState.UNAVAILABLE, broken, reason)
            self._put_unless_it_runs_locked(entry)

    def health_changed(self, health: InstanceHealth) -> None:
        """Update whether a model accepts requests after its instances failed or recovered."""
        with self._lock:
            entry = self._entries.get(health.name, {}).get(health.version)
            if entry is None or entry.model is None or entry.model.health is not health:
                return
            if entry.state is not ModelState.UNLOADING and (
                entry.state is ModelState.READY or health.reason is None
            ):
                self._put_loaded_locked(entry.model)

    def _put_loaded_locked(self, model: Model) -> None:
        """Put a loaded model, READY if one of its instances works, and so do the models that its steps name."""
        self._put_locked(self._entry_of_locked(model))

    def _entry_of_locked(self, model: Model) -> RegistryEntry:
        reasons = (model.health.reason or "", *map(self._missing_locked, model.uses))
        reason = next(filter(None, reasons), "")
        state = ModelState.UNAVAILABLE if reason else ModelState.READY
        return RegistryEntry(model.name, model.version, state, model, reason)

    def _missing_locked(self, used: ModelReference) -> str:
        """Return why a model that a step names cannot run it; "" if it can."""
        entry = self._used_locked(used)
        which = f"model {used.name!r}" + (f" version {used.version}" if used.version else "")
        if entry is None:
            return f"its steps need {which}, which is not loaded"
        if entry.state is not ModelState.READY or entry.model is None:
            why = f" ({entry.reason})" if entry.reason else ""
            return f"its steps need {which}, which is {entry.state.value}{why}"
        if misfit := entry.model.misfit(used):
            return f"its steps need {which}, which was replaced by one that does not fit them: {misfit}"
        return ""

    def _used_locked(self, used: ModelReference) -> RegistryEntry | None:
        versions = self._entries.get(used.name, {})
        if used.version:
            return versions.get(used.version)
        return _latest_for_steps(versions) if versions else None

    def _refresh_users_locked(self, name: str) -> None:
        """Update whether models whose steps name this one accept requests."""
        for user in self._users_locked(name):
            before, now = self._entries[user.name][user.version], self._entry_of_locked(user)
            changes = before.state is not now.state or before.reason != now.reason
            if changes and before.state in (ModelState.READY, ModelState.UNAVAILABLE):
                self._put_locked(now)

    def _users_locked(self, name: str) -> Sequence[Model]:
        """Return the loaded models whose steps name this one."""
        return [
            entry.model
            for versions in self._entries.values()
            for entry in versions.values()
            if entry.model is not None and any(used.name == name for used in entry.model.uses)
        ]

    def _failed_model_locked(self, name: str, version: str) -> Model | None:
        """Return the model of a version whose devices failed. It may recover until it is replaced."""
        entry = self._entries.get(name, {}).get(version)
        if entry is None or entry.state not in (ModelState.UNAVAILABLE, ModelState.LOADING):
            return None
        return entry.model

    @property
    def serving(self) -> bool:
        """Whether loading at startup is complete and a model works, or no model is needed."""
        with self._lock:
            entries = [entry for versions in self._entries.values() for entry in versions.values()]
        works = any(entry.state is ModelState.READY for entry in entries)
        broken = any(
            entry.model is not None and entry.state in (ModelState.UNAVAILABLE, ModelState.LOADING)
            for entry in entries
        )
        return self.complete and (works or (self._may_be_empty and not broken))

    def mark_unloading(self, model: Model) -> Model:
        """Record that a version is being unloaded, and accepts no requests.

        Returns its model, which `replace` may have put in place of the given one.
        """
        with self._lock:
            entry = self._entries.get(model.name, {}).get(model.version)
            now = model if entry is None or entry.model is None else entry.model
            self._retire_locked(now)
            self._put_locked(RegistryEntry(now.name, now.version, ModelState.UNLOADING, now))
        return now

    def _retire_locked(self, model: Model | None) -> None:
        if model is not None and isinstance(model.batcher, StatefulBatcher):
            self.retired += (model,)

    def forget_retired(self, model: Model) -> None:
        """Let a model that serves no more go on with no sequence."""
        with self._lock:
            self.retired = tuple([other for other in self.retired if other is not model])

    def mark_unloaded(self, model: Model) -> None:
        """Record that a version has answered its requests and was unloaded, unless it was loaded again."""
        with self._lock:
            entry = self._entries.get(model.name, {}).get(model.version)
            if entry is not None and entry.model is model:
                which = (model.name, model.version)
                unloaded = RegistryEntry(*which, ModelState.UNAVAILABLE, None, _UNLOADED)
                self._put_locked(entry.after or unloaded)

    def forget_failure(self, name: str, version: str) -> bool:
        """Record a version that could not be loaded as unloaded; return False if there is no such failure."""
        with self._lock:
            entry = self._entries.get(name, {}).get(version)
            if entry is None or entry.is_unloaded or (entry.model is not None and entry.after is None):
                return False
            unloaded = RegistryEntry(name, version, ModelState.UNAVAILABLE, None, _UNLOADED)
            self._put_locked(unloaded if entry.model is None else replace(entry, after=None))
        return True

    def _put_unless_it_runs_locked(self, entry: RegistryEntry) -> None:
        """Put the entry of a version that is loaded, now or once it is unloaded; not in place of one that is ready."""
        now = self._entries.get(entry.name, {}).get(entry.version)
        if now is not None and now.state is ModelState.UNLOADING:
            # It still runs steps of requests that were accepted.
            self._put_locked(replace(now, after=entry))
        elif now is None or now.state is not ModelState.READY:
            self._put_locked(entry)

    def _put_locked(self, entry: RegistryEntry) -> None:
        self._entries.setdefault(entry.name, {})[entry.version] = entry
        entries = [each for versions in self._entries.values() for each in versions.values()]
        models = [each.model for each in entries if each.model is not None]
        self.only_model = models[0] if len(models) == 1 else None
        self.generation += 1
        # Ends, because a model is loaded only if its steps' models are: so none names itself.
        self._refresh_users_locked(entry.name)

    def get(self, name: str, version: str = "") -> Model:
        """Return the model for a client's request. Raises as `find`, but NotReadyError for an unknown model while the
        models of the start are being loaded.
        """
        # Before the search, because the model may be loaded in between.
        complete = self.complete
        try:
            return self.find(name, version)
        except NotFoundError:
            if complete:
                raise
            raise NotReadyError(
                f"model {name!r} is not loaded yet, if the server has it: models are still being loaded; retry"
            ) from None

    def find(self, name: str, version: str = "") -> Model:
        """Return the model that serves this name and version ("" for the latest).

        InvalidRequestError for a version that is not a number, NotFoundError for an unknown one, NotReadyError for one
        that does not accept requests now.
        """
        entry = self._entry(name, version, _latest)
        if entry.state is not ModelState.READY or entry.model is None:
            raise self._not_ready(entry)
        return entry.model

    def step_model(self, name: str, version: str = "") -> Model:
        """Return the model that runs the steps that name it. Raises as `get`.

        A model that is being unloaded still runs the steps of requests that were accepted before.
        """
        entry = self._entry(name, version, _latest_for_steps)
        if entry.model is None or entry.state not in (ModelState.READY, ModelState.UNLOADING):
            raise self._not_ready(entry)
        return entry.model

    def public_reason(self, reason: str) -> str:
        """Return the reason without paths of the server, for callers that may not control models."""
        return without_paths(reason, self._roots)

    def _not_ready(self, entry: RegistryEntry) -> NotReadyError:
        why = f" ({self.public_reason(entry.reason)})" if entry.reason else ""
        return NotReadyError(
            f"model {entry.name!r} version {entry.version} is not at ready state: it is {entry.state.value}{why}"
        )

    def needs(self, user: Model, model: Model) -> bool:
        """Whether steps of a model are run by the other one, or by models that need it."""
        with self._lock:
            # By their ids, because equality compares all fields of models.
            found = {id(user): user}
            left = [user]
            while left:
                for used in left.pop().uses:
                    entry = self._used_locked(used)
                    if entry is not None and entry.model is not None and id(entry.model) not in found:
                        found[id(entry.model)] = entry.model
                        left.append(entry.model)
            return id(model) in found

    def _entry(
        self, name: str, version: str, latest: Callable[[Mapping[str, RegistryEntry]], RegistryEntry]
    ) -> RegistryEntry:
        if version and not version.isdecimal():
            raise InvalidRequestError(
                f"failed to get model version from specified version string {version!r}: it must be a number of at "
                "least 1, or empty for the latest"
            )
        with self._lock:
            versions = self._entries.get(name)
            if versions is None:
                known = ", ".join(sorted(self._entries)) or "none"
                raise NotFoundError(
                    f"Request for unknown model: {name!r} is not found; the server has: {known}"
                )
            if not version:
                return latest(versions)
            if version in versions:
                return versions[version]
            raise NotFoundError(
                f"Request for unknown model: {name!r} version {version} is not found; "
                f"the server has version {', '.join(versions)}"
            )

    def users(self, name: str) -> Sequence[Model]:
        """Return the loaded models whose steps name this one, or name such a model."""
        with self._lock:
            found: dict[tuple[str, str], Model] = {}
            names = [name]
            for each in names:
                for user in self._users_locked(each):
                    if found.setdefault((user.name, user.version), user) is user and user.name not in names:
                        names.append(user.name)
            return list(found.values())

    def is_outdated(self, name: str, version: str) -> bool:
        """Whether a loaded version must be loaded again, because a model that its steps name has changed."""
        with self._lock:
            entry = self._entries.get(name, {}).get(version)
            if entry is None or entry.model is None:
                return False
            for used in entry.model.uses:
                now = self._used_locked(used)
                ready = None if now is None or now.state is not ModelState.READY else now.model
                if ready is not None and ready.misfit(used):
                    return True
            return False

    def serves(self, name: str, version: str = "") -> bool:
        """Whether this version of the model accepts requests, or any."""
        try:
            return self._entry(name, version, _latest).state is ModelState.READY
        except NotFoundError:
            return False

    def entries(self) -> Sequence[RegistryEntry]:
        """Return all versions, sorted by name and version."""
        with self._lock:
            return [
                self._entries[name][version]
                for name in sorted(self._entries)
                for version in sorted(self._entries[name], key=int)
            ]

    def unavailable(self) -> Sequence[str]:
        """Return the models that have a version that is not served."""
        entries = self.entries()
        return list(dict.fromkeys(each.name for each in entries if each.state is ModelState.UNAVAILABLE))

    def models(self) -> Sequence[Model]:
        """Return all loaded models, ready or unloading."""
        return [entry.model for entry in self.entries() if entry.model is not None]


def _latest(versions: Mapping[str, RegistryEntry]) -> RegistryEntry:
    """Return the default version: the highest ready version, or else the highest."""
    return max(versions.values(), key=lambda entry: (entry.state is ModelState.READY, int(entry.version)))


def _latest_for_steps(versions: Mapping[str, RegistryEntry]) -> RegistryEntry:
    """Return the default version for steps: if none is ready, the highest that is being unloaded, or else the highest."""
    latest = _latest(versions)
    unloading = {key: entry for key, entry in versions.items() if entry.state is ModelState.UNLOADING}
    return latest if latest.state is ModelState.READY or not unloading else _latest(unloading)
