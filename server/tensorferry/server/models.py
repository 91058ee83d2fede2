"""The models that the server has: lifecycle, and look-up by name and version."""

from __future__ import annotations

import enum
import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tensorferry.batcher import Batcher, Padding
from tensorferry.server.errors import InvalidRequestError, NotFoundError, NotReadyError
from tensorferry.server.signature import Signature

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class ModelState(enum.Enum):
    """LOADING → READY → UNLOADING; only READY takes requests."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded version of a model. `max_batch_size` 0 means that each request runs alone.

    `slo` is the time in seconds that every request has at most, inf for no such limit.
    `padding` says how requests of different lengths share a batch; None when they do not.
    `labels` are the names of the classes, by output.
    """

    name: str
    version: str
    signature: Signature
    max_batch_size: int
    batching: str
    batcher: Batcher
    slo: float = math.inf
    padding: Padding | None = None
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def batched(self) -> bool:
        """Whether axis 0 counts rows that may share a batch."""
        return self.max_batch_size > 0

    def __str__(self) -> str:
        return f"{self.name}{self.signature}, {self.batching}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the registry knows of one version: its state, and the model once it is loaded."""

    name: str
    version: str
    state: ModelState
    model: Model | None = None


class ModelRegistry:
    """Models by name and version. Every method is thread-safe."""

    def __init__(self) -> None:
        # Guards _entries and changes of generation. Held for look-ups and replacements only; models are loaded and closed outside.
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, Entry]] = {}
        # Grows whenever an entry changes: what was looked up before is then stale.
        self.generation = 0

    def loading(self, name: str, version: str) -> None:
        """Announces a version that is being loaded."""
        self._put(Entry(name, version, ModelState.LOADING))

    def ready(self, model: Model) -> None:
        """The version takes requests from now on."""
        self._put(Entry(model.name, model.version, ModelState.READY, model))

    def unloading(self, model: Model) -> None:
        """The version takes no more requests."""
        self._put(Entry(model.name, model.version, ModelState.UNLOADING, model))

    def _put(self, entry: Entry) -> None:
        with self._lock:
            self._entries.setdefault(entry.name, {})[entry.version] = entry
            self.generation += 1

    def get(self, name: str, version: str = "") -> Model:
        """The model that serves this name and version ("" for the latest).

        InvalidRequestError for a version that is no number, NotFoundError for one that is not
        there, NotReadyError for one that does not take requests now.
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
            entry = versions.get(version or max(versions, key=int))
            if entry is None:
                raise NotFoundError(
                    f"Request for unknown model: {name!r} version {version} is not found; "
                    f"the server has version {', '.join(versions)}"
                )
        if entry.state is not ModelState.READY or entry.model is None:
            raise NotReadyError(
                f"model {name!r} version {entry.version} is not at ready state: it is {entry.state.value}"
            )
        return entry.model

    def entries(self) -> Sequence[Entry]:
        """All versions, by name and version."""
        with self._lock:
            return [
                self._entries[name][version]
                for name in sorted(self._entries)
                for version in sorted(self._entries[name], key=int)
            ]

    def models(self) -> Sequence[Model]:
        """All loaded models, ready or unloading."""
        return [entry.model for entry in self.entries() if entry.model is not None]
