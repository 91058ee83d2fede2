"""RepositoryIndex, RepositoryModelLoad and RepositoryModelUnload: list, load and unload models."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import InvalidRequestError, truncate
from tensorferry.server.identity import CONTROL, CURRENT_CLIENT
from tensorferry.server.models.lifecycle.registry import ModelRegistry, ModelState
from tensorferry.server.models.repository.repository_control import RepositoryController
from tensorferry.server.names import NAME, NAME_RULE
from tensorferry.server.wire import bounds

CONFIG, FILE = "config", "file:"
_UNLOAD_DEPENDENTS = "unload_dependents"

_MAX_PARTS = 16
# The longest file name of common file systems.
_MAX_PART_LENGTH = 255
# The error names the field first, then quotes the text.
_MAX_JSON_ERROR_LENGTH = 512

# VERSION/FILE, or deeper, always inside the model's directory.
_FILE_PATH = re.compile(r"[1-9][0-9]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")


class RepositoryMethods:
    """The protocol's extension `model_repository`. Thread-safe.

    Clients see one repository: `repository_name` must be empty, as in Triton.
    """

    names: Sequence[str] = ("model_repository", "model_repository(unload_dependents)")

    def __init__(self, registry: ModelRegistry, control: RepositoryController) -> None:
        self._registry = registry
        self._control = control

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the three methods."""
        return {
            "RepositoryIndex": self.index,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
        }

    def index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """Return every model version and its state; with `ready`, only those that accept requests.

        A model that was never loaded has no version. It has a reason if its versions cannot be determined. Callers
        without the role `control` get reasons without paths.
        """
        _check_repository(request.repository_name)
        may_control = CONTROL in CURRENT_CLIENT.get().roles

        def shown(reason: str) -> str:
            # A model's own error may have a lone surrogate, which has no UTF-8.
            text = reason if may_control else self._registry.public_reason(reason)
            return text.encode(errors="replace").decode()

        index = pb.RepositoryIndexResponse.ModelIndex
        models: list[pb.RepositoryIndexResponse.ModelIndex] = [
            index(
                name=entry.name,
                version=entry.version,
                state=entry.state.value,
                reason=shown(entry.reason),
            )
            for entry in self._registry.entries()
            if entry.state is ModelState.READY or not request.ready
        ]
        if not request.ready:
            models += [
                index(
                    name=name,
                    state=ModelState.UNAVAILABLE.value if reason else "",
                    reason=shown(reason),
                )
                for name, reason in self._control.models_without_versions().items()
            ]
        return pb.RepositoryIndexResponse(models=sorted(models, key=operator.attrgetter("name")))

    def load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Load a model, or the versions of it that have changed. Return when it is ready."""
        _check_repository(request.repository_name)
        _check_name(request.model_name)
        config: ModelConfig | None = None
        files: dict[str, bytes] = {}
        for name, parameter in request.parameters.items():
            kind = parameter.WhichOneof("parameter_choice")
            if name == CONFIG and kind == "string_param":
                config = _config(parameter.string_param, request.model_name)
            elif name.startswith(FILE) and kind == "bytes_param":
                path = name.removeprefix(FILE)
                if not _FILE_PATH.fullmatch(path):
                    raise InvalidRequestError(
                        f"parameter {truncate(name)!r} must be 'file:VERSION/NAME', such as 'file:1/model.onnx'"
                    )
                _check_path(path)
                files[path] = parameter.bytes_param
            elif name == CONFIG or name.startswith(FILE):
                expected = "string_param" if name == CONFIG else "bytes_param"
                raise InvalidRequestError(
                    f"invalid value type for load parameter {truncate(name)!r}: it is {kind}, it must be {expected}"
                )
            else:
                raise InvalidRequestError(
                    f"unrecognized load parameter {truncate(name)!r}; known are 'config' and 'file:VERSION/NAME'"
                )
        if files and config is None:
            raise InvalidRequestError(
                "a load with files needs a configuration: give the parameter 'config', a ModelConfig in JSON"
            )
        self._control.load(request.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    def unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        """Stop accepting requests for a model. Accepted requests are still answered after the return."""
        _check_repository(request.repository_name)
        _check_name(request.model_name)
        for name, parameter in request.parameters.items():
            if name != _UNLOAD_DEPENDENTS or parameter.WhichOneof("parameter_choice") != "bool_param":
                raise InvalidRequestError(
                    f"unrecognized unload parameter {truncate(name)!r}, or not of its type; known is {_UNLOAD_DEPENDENTS!r}, a "
                    "bool_param"
                )
        dependents = request.parameters[_UNLOAD_DEPENDENTS].bool_param if request.parameters else False
        self._control.unload(request.model_name, dependents=dependents)
        return pb.RepositoryModelUnloadResponse()


def _check_repository(name: str) -> None:
    if name:
        raise InvalidRequestError(f"repository_name is {name!r}; it must be empty, for all repositories")


def _check_path(path: str) -> None:
    parts = path.split("/")
    if len(parts) > _MAX_PARTS or max(map(len, parts)) > _MAX_PART_LENGTH:
        raise InvalidRequestError(
            f"the path {truncate(path)!r} has {len(parts)} parts, the longest of {max(map(len, parts))} characters; this server "
            f"takes at most {_MAX_PARTS} parts of {_MAX_PART_LENGTH} characters: send the file with a shorter path"
        )


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidRequestError(f"model_name is {name!r}; {NAME_RULE}")


def _config(text: str, name: str) -> ModelConfig:
    # Counts what can begin an entry of an object or list, because parsing each takes 5 us.
    entries = sum(map(text.count, ",{["))
    if entries > bounds.MAX_FIELDS:
        raise InvalidRequestError(
            f"parameter 'config' has {entries} entries; this server takes at most {bounds.MAX_FIELDS}: send what the model needs"
        )
    try:
        config = json_format.Parse(text, ModelConfig())
    except json_format.ParseError as error:
        raise InvalidRequestError(
            f"parameter 'config' is not a ModelConfig in JSON: {truncate(str(error), _MAX_JSON_ERROR_LENGTH)}"
        ) from None
    if config.name not in ("", name):
        raise InvalidRequestError(
            f"parameter 'config' has the name {truncate(config.name)!r}; it must be {name!r}, or none"
        )
    return config
