"""Calls that are not inference: the request message of each, and the conversion of its answer.

Pure functions. Both clients make the calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages import arguments
from tensorferry.client.messages.metadata import ModelMetadata, ModelStatus, ServerMetadata
from tensorferry.client.messages.statistics import ModelStatistics
from tensorferry.protos import inference_pb2 as pb

T = TypeVar("T")

Config = Mapping[str, object] | str
File = bytes | str | Path
TraceSettings = Mapping[str, tuple[str, ...]]
LogSettings = Mapping[str, bool | int | str]


@dataclass(frozen=True, slots=True)
class Rpc(Generic[T]):
    """One unary call: name of the method, message, and conversion of the answer."""

    method: str
    message: Message
    decode: Callable[[Any], T]


SERVER_LIVE = Rpc("ServerLive", pb.ServerLiveRequest(), lambda answer: bool(answer.live))
SERVER_READY = Rpc("ServerReady", pb.ServerReadyRequest(), lambda answer: bool(answer.ready))
SERVER_METADATA = Rpc("ServerMetadata", pb.ServerMetadataRequest(), ServerMetadata.from_message)


def model_ready(model: str, version: str) -> Rpc[bool]:
    """Return the call ModelReady."""
    arguments.model(model, version)
    message = pb.ModelReadyRequest(name=model, version=version)
    return Rpc("ModelReady", message, lambda answer: bool(answer.ready))


def model_metadata(model: str, version: str) -> Rpc[ModelMetadata]:
    """Return the call ModelMetadata."""
    arguments.model(model, version)
    message = pb.ModelMetadataRequest(name=model, version=version)
    return Rpc("ModelMetadata", message, ModelMetadata.from_message)


def repository_index(ready: bool) -> Rpc[tuple[ModelStatus, ...]]:
    """Return the call RepositoryIndex."""
    _boolean("ready", ready)
    return Rpc("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready), ModelStatus.from_message)


def load_model(model: str, config: Config | None, files: Mapping[str, File] | None) -> Rpc[None]:
    """Return the call RepositoryModelLoad, with the configuration as JSON and the contents of the files."""
    arguments.model(model, "")
    message = pb.RepositoryModelLoadRequest(model_name=model)
    if config is not None:
        message.parameters["config"].string_param = _json(config)
    if files is not None:
        change = "write {'1/model.onnx': Path('new.onnx')}"
        for path, content in arguments.mapping("files", files, change).items():
            message.parameters[f"file:{path}"].bytes_param = _content(path, content)
    return Rpc("RepositoryModelLoad", message, nothing)


def unload_model(model: str, dependents: bool) -> Rpc[None]:
    """Return the call RepositoryModelUnload."""
    arguments.model(model, "")
    message = pb.RepositoryModelUnloadRequest(model_name=model)
    if _boolean("dependents", dependents):
        message.parameters["unload_dependents"].bool_param = True
    return Rpc("RepositoryModelUnload", message, nothing)


def model_config(model: str, version: str) -> Rpc[dict[str, Any]]:
    """Return the call ModelConfig."""
    arguments.model(model, version)
    message = pb.ModelConfigRequest(name=model, version=version)
    return Rpc("ModelConfig", message, lambda answer: _plain(answer.config))


def statistics(model: str, version: str) -> Rpc[tuple[ModelStatistics, ...]]:
    """Return the call ModelStatistics; an empty name asks for all models."""
    arguments.text("the model's name", model, change="give the name as a str, or '' for all models")
    arguments.text("the model's version", version, expected="a str ('' for all versions)")
    message = pb.ModelStatisticsRequest(name=model, version=version)
    return Rpc("ModelStatistics", message, ModelStatistics.from_message)


def trace_settings(model: str, changes: Mapping[str, object] | None = None) -> Rpc[TraceSettings]:
    """Return the call TraceSetting; a value of None asks for the default of the setting."""
    arguments.text(
        "the model's name", model, change="give the name as a str, or '' for the server's settings"
    )
    message = pb.TraceSettingRequest(model_name=model)
    change = "write {'trace_level': 'TIMESTAMPS'}"
    for name, value in arguments.mapping("settings", {} if changes is None else changes, change).items():
        message.settings[name].value.extend(_texts(name, value))
    return Rpc("TraceSetting", message, _trace_settings)


def log_settings(changes: Mapping[str, object] | None = None) -> Rpc[LogSettings]:
    """Return the call LogSettings."""
    message = pb.LogSettingsRequest()
    change = "write {'log_info': False}"
    for name, value in arguments.mapping("settings", {} if changes is None else changes, change).items():
        setting = message.settings[name]
        # bool comes first, because it is a subclass of int.
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, str):
            setting.string_param = arguments.text(f"setting {name!r}", value)
        else:
            setting.uint32_param = arguments.integer(f"setting {name!r}", value, 0, 2**32 - 1)
    return Rpc("LogSettings", message, _log_settings)


def nothing(answer: object) -> None:
    """Return None for an answer that says nothing."""


def _boolean(subject: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(subject, "a bool", arguments.shown(value), "write True or False")
    return value


def _json(config: object) -> str:
    if isinstance(config, str):
        return arguments.text("config", config)
    change = "write {'max_batch_size': 16}, or the same as JSON"
    try:
        return json.dumps(dict(arguments.mapping("config", config, change)))
    except (TypeError, ValueError) as error:
        raise InvalidInput("config", "values that JSON has", str(error), change) from None


def _content(path: str, content: object) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, (str, Path)):
        return arguments.content(f"file {path!r}", "a file", str(content))
    raise InvalidInput(
        f"file {path!r}", "bytes, or the path of a file", arguments.shown(content), "give one of these"
    )


def _texts(name: str, value: object) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return [arguments.text(f"each value of setting {name!r}", one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return (str(value),)
    change = "write it as a str, or None for the default"
    return (
        arguments.text(f"setting {name!r}", value, expected="a str, an int or a list of str", change=change),
    )


def _trace_settings(answer: pb.TraceSettingResponse) -> TraceSettings:
    return {name: tuple(setting.value) for name, setting in sorted(answer.settings.items())}


def _log_settings(answer: pb.LogSettingsResponse) -> LogSettings:
    return {
        name: getattr(setting, setting.WhichOneof("parameter_choice") or "string_param")
        for name, setting in sorted(answer.settings.items())
    }


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as a dict with every field, under the names of the .proto file.

    Messages become dicts, repeated fields lists, and enums their names. 64-bit integers stay int,
    unlike in protobuf's JSON. A message field that is not set is left out.
    """
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            of_value = entry.fields_by_name["value"]
            fields[field.name] = {key: _value(of_value, value[key]) for key in sorted(value)}
        elif _is_repeated(field):
            fields[field.name] = [_value(field, one) for one in value]
        else:
            fields[field.name] = _value(field, value)
    return fields


def _is_repeated(field: Any) -> bool:
    # Versions of protobuf before 6.31 lack `is_repeated`; later ones warn about `label`.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return _plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value
