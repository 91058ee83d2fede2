"""The server's configuration, and the table of its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.server.config.option import Option, OptionScope, options_in
from tensorferry.server.config.option_groups.batching import BatchingOptions, CachingOptions, SequenceOptions
from tensorferry.server.config.option_groups.devices import DeviceOptions
from tensorferry.server.config.option_groups.limits import ClientLimitOptions, RequestLimitOptions
from tensorferry.server.config.option_groups.models import ModelOptions
from tensorferry.server.config.option_groups.network import NetworkOptions, ShutdownOptions
from tensorferry.server.config.option_groups.observability import ObservabilityOptions
from tensorferry.server.config.option_groups.security import PermissionOptions, SecurityOptions
from tensorferry.server.models.remote.url import RemoteUrl

if TYPE_CHECKING:
    # The supervisor reads the configuration, and must import neither protobuf nor numpy.
    from tensorferry.protos.model_config_pb2 import ModelConfig
    from tensorferry.serving import Declaration


# Of a file that declares models.
PYTHON_SUFFIX = ".py"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model version to serve: its name and its ONNX file.

    `config` is the content of the model's config.pbtxt, None if there is none. `directory` is the model's directory in
    its repository, None for a model that was named by its file. `declaration` is that of a model in the Python file `path`,
    None if the file is ONNX, or a Python file that has not been imported. `origin` is the address of a file that is
    elsewhere; `path` is only its name until it is fetched. `keep_alive` keeps temporary files as long as the source, because a
    model whose device fails is loaded again.
    """

    name: str
    path: Path
    version: str = "1"
    config: ModelConfig | None = None
    directory: Path | None = None
    declaration: Declaration | None = field(default=None, compare=False)
    origin: RemoteUrl | None = None
    keep_alive: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ServerConfig(
    ModelOptions,
    NetworkOptions,
    SecurityOptions,
    DeviceOptions,
    BatchingOptions,
    SequenceOptions,
    CachingOptions,
    RequestLimitOptions,
    ClientLimitOptions,
    ShutdownOptions,
    PermissionOptions,
    ObservabilityOptions,
):
    """The models to serve, and the value of every option. Times are in seconds, sizes in bytes.

    `model_options` has the options of single models: by the model's name, then by field.
    """

    models: tuple[ModelSource, ...]
    model_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False, kw_only=True)

    def for_model(self, name: str) -> ServerConfig:
        """Return the configuration with the options of one model."""
        return replace(self, **self.model_options.get(name, {}))

    def values(self, field: str) -> Sequence[Any]:
        """Return the value of an option of the whole server, then its values for single models, each once."""
        own = [options[field] for options in self.model_options.values() if field in options]
        return list(dict.fromkeys([getattr(self, field), *own]))


_STANDALONE: Mapping[str, Any] = {"scope": OptionScope.STANDALONE}
_PER_MODEL: Mapping[str, Any] = {"per_model": True}

# By the titles that help and documentation show, in their order. The settings are those of all options of the group.
GROUPS: Mapping[str, tuple[Option, ...]] = {
    title: tuple(options_in(group, title, of_all))
    for title, group, of_all in (
        ("models", ModelOptions, {}),
        ("network", NetworkOptions, _STANDALONE),
        ("TLS and authentication", SecurityOptions, _STANDALONE),
        ("devices", DeviceOptions, {}),
        ("batching and scheduling", BatchingOptions, _PER_MODEL),
        ("sequences", SequenceOptions, _PER_MODEL),
        ("cache", CachingOptions, _PER_MODEL),
        ("limits for requests and all clients", RequestLimitOptions, {}),
        ("limits for each client", ClientLimitOptions, {**_STANDALONE, **_PER_MODEL}),
        ("shutdown", ShutdownOptions, {}),
        ("permissions and status codes", PermissionOptions, {}),
        ("metrics, traces and logs", ObservabilityOptions, {}),
    )
}
OPTIONS: tuple[Option, ...] = tuple(option for group in GROUPS.values() for option in group)
