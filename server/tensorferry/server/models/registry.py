"""Registry of the server's models: lifecycle, and look-up by name and version."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorferry.batcher import Batcher, Padding, Pipeline
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import InvalidRequestError, NotFoundError, NotReadyError
from tensorferry.server.recovery.instance_health import InstanceHealth
from tensorferry.server.shapes.empty_axes import EmptyAxes
from tensorferry.server.signature import Signature
from tensorferry.server.steps.stage_function import StepTimes
from tensorferry.server.telemetry.exemplars import Exemplars

_UNLOADED = "unloaded"


class ModelState(enum.Enum):
    """LOADING → READY → UNLOADING → UNAVAILABLE. Only READY accepts requests.

    If the devices of a version fail, it is UNAVAILABLE, with its model, until they work again.
    """

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A step of a model: a Python function ("python"), an ONNX model ("onnx") or another model of the server ("model").

    `stage` is the name of the stage whose batches it runs. `inputs` and `outputs` map its names to the model's tensors.
    `times` has what each instance ran; it is empty if the batcher of the stage knows that alone.
    """

    name: str
    kind: str
    stage: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    times: tuple[StepTimes, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded version of a model. If `max_batch_size` is 0, requests have no batch axis, and each runs alone.

    `batching` describes batching to people; `batching_verdict` is as in `BatchingDecision`. `slo` limits the time of
    every request, in seconds; inf is no limit. `padding` lets requests of different lengths share a batch. `config` is
    the completed configuration. `labels` are class names by output. `devices` has the device of each instance, `health`
    their state. `exemplars` collects traced requests for the metrics; None without metrics. `empty_axes` says which axes
    of a request may have length zero. `steps` describes what a batch runs through. `release` ends what its instances started, after the batcher is closed.
    """

    name: str
    version: str
    signature: Signature
    max_batch_size: int
    batching: str
    batcher: Batcher | Pipeline
    slo: float = math.inf
    padding: Padding | None = None
    config: ModelConfig = field(default_factory=ModelConfig, compare=False)
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    health: InstanceHealth = field(default_factory=InstanceHealth, compare=False)
    exemplars: Exemplars | None = field(default=None, compare=False)
    empty_axes: EmptyAxes = field(default_factory=EmptyAxes)
    batching_verdict: str = "off"
    steps: tuple[ModelStep, ...] = ()
    release: Callable[[], None] = field(default=lambda: None, compare=False)

    @property
    def batched(self) -> bool:
        """Whether axis 0 counts rows."""
        return self.max_batch_size > 0

    def __str__(self) -> str:
        return f"{self.name}{self.signature}, {self.batching}"


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """The state of a version, its model while it is loaded, and the reason if it is unavailable.

    `public_reason` is the reason without paths of the server, for callers without permission to control models.
    """

    name: str
    version: str
    state: ModelState
    model: Model | None = None
    reason: str = ""
    public_reason: str = ""

    @property
    def is_unloaded(self) -> bool:
        """Whether the version was unloaded on request or replaced."""
        return self.model is None and self.reason == _UNLOADED


class ModelRegistry:
    """Models by name and version. Every method is thread-safe.

    `may_be_empty` says whether a server without models is ready, because clients may load some later.
    """

    def __init__(self, *, may_be_empty: bool = True) -> None:
        self._may_be_empty = may_be_empty
        # Guards _entries, generation and only_model. Held only for look-ups and updates, which may read a model's health.
        # Models are loaded and closed without it. The last two are also read without it.
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, RegistryEntry]] = {}
        # Increases when an entry changes, so that callers can detect stale look-ups.
        self.generation = 0
        # The loaded model, ready or unloading; None if there are several, or none.
        self.only_model: Model | None = None
        self._complete = False

    @property
    def complete(self) -> bool:
        """Whether every model that is served from the start was loaded, or failed to load."""
        return self._complete

    def mark_complete(self) -> None:
        """Record that the models served from the start were all tried."""
        self._complete = True

    def mark_loading(self, name: str, version: str) -> None:
        """Record that a version is being loaded. If it is ready, it serves until it is replaced."""
        with self._lock:
            if not self._serves_locked(name, version):
                broken = self._failed_model_locked(name, version)
                self._put_locked(RegistryEntry(name, version, ModelState.LOADING, broken))

    def mark_ready(self, model: Model) -> Model | None:
        """Let a version accept requests. Returns the model that it replaces, which accepts none any more."""
        with self._lock:
            before = self._entries.get(model.name, {}).get(model.version)
            self._put_loaded_locked(model)
        return before.model if before is not None else None

    def mark_failed(self, name: str, version: str, reason: str, public_reason: str | None = None) -> None:
        """Record that a version could not be loaded. If it is ready, it continues to serve.

        The default of `public_reason` is `reason`.
        """
        with self._lock:
            if not self._serves_locked(name, version):
                broken = self._failed_model_locked(name, version)
                public = reason if public_reason is None else public_reason
                self._put_locked(RegistryEntry(name, version, ModelState.UNAVAILABLE, broken, reason, public))

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
        """Put a loaded model, READY if one of its instances works."""
        reason = model.health.reason
        state = ModelState.READY if reason is None else ModelState.UNAVAILABLE
        self._put_locked(RegistryEntry(model.name, model.version, state, model, reason or "", reason or ""))

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
        return self._complete and (works or (self._may_be_empty and not broken))

    def mark_unloading(self, model: Model) -> None:
        """Record that a version is being unloaded, and accepts no requests."""
        with self._lock:
            self._put_locked(RegistryEntry(model.name, model.version, ModelState.UNLOADING, model))

    def mark_unloaded(self, model: Model) -> None:
        """Record that a version has answered its requests and was unloaded, unless it was loaded again."""
        with self._lock:
            entry = self._entries.get(model.name, {}).get(model.version)
            if entry is not None and entry.model is model:
                self._put_locked(
                    RegistryEntry(
                        model.name, model.version, ModelState.UNAVAILABLE, None, _UNLOADED, _UNLOADED
                    )
                )

    def _serves_locked(self, name: str, version: str) -> bool:
        entry = self._entries.get(name, {}).get(version)
        return entry is not None and entry.state is ModelState.READY

    def _put_locked(self, entry: RegistryEntry) -> None:
        self._entries.setdefault(entry.name, {})[entry.version] = entry
        entries = [each for versions in self._entries.values() for each in versions.values()]
        models = [each.model for each in entries if each.model is not None]
        self.only_model = models[0] if len(models) == 1 else None
        self.generation += 1

    def get(self, name: str, version: str = "") -> Model:
        """Return the model that serves this name and version ("" for the latest).

        InvalidRequestError for a version that is not a number, NotFoundError for an unknown one, NotReadyError for one
        that does not accept requests now.
        """
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
                entry = _latest(versions)
            elif version in versions:
                entry = versions[version]
            else:
                raise NotFoundError(
                    f"Request for unknown model: {name!r} version {version} is not found; "
                    f"the server has version {', '.join(versions)}"
                )
        if entry.state is not ModelState.READY or entry.model is None:
            why = f" ({entry.public_reason})" if entry.public_reason else ""
            raise NotReadyError(
                f"model {name!r} version {entry.version} is not at ready state: it is {entry.state.value}{why}"
            )
        return entry.model

    def serves(self, name: str) -> bool:
        """Whether a version of the model accepts requests."""
        with self._lock:
            return _latest(self._entries[name]).state is ModelState.READY if name in self._entries else False

    def entries(self) -> Sequence[RegistryEntry]:
        """Return all versions, sorted by name and version."""
        with self._lock:
            return [
                self._entries[name][version]
                for name in sorted(self._entries)
                for version in sorted(self._entries[name], key=int)
            ]

    def models(self) -> Sequence[Model]:
        """Return all loaded models, ready or unloading."""
        return [entry.model for entry in self.entries() if entry.model is not None]


def _latest(versions: Mapping[str, RegistryEntry]) -> RegistryEntry:
    """Return the default version: the highest ready version, or else the highest."""
    return max(versions.values(), key=lambda entry: (entry.state is ModelState.READY, int(entry.version)))
