"""Paths of the v2 protocol: each fills the request message of its gRPC method, whose handler answers it.

The paths are those of Triton and KServe; SageMaker checks /ping.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict

from tensorferry.protos import SERVICE_NAME
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import truncate
from tensorferry.server.transport.http.answers import json_response, response
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.parameters import set_parameter, value_of

_Fields = Mapping[str, Any]


class Route(NamedTuple):
    """What is done for one method of HTTP on one form of path.

    `rpc` is the method of the protocol; `request` returns its message for the parts of the path and the JSON body, and
    `answer` the HTTP response for its result. `before` names a method that is called first, for its error.
    """

    method: str
    rpc: str
    request: Callable[[Mapping[str, str], _Fields], Any]
    answer: Callable[[Any, Mapping[str, str]], bytes]
    before: str = ""


class Target(NamedTuple):
    """The route of a request and the parts of its path. `infer` is the model and the version of an inference."""

    route: Route
    parts: Mapping[str, str]
    infer: tuple[str, str] | None = None


def target_of(method: str, path: str) -> Target:
    """Return what serves a method and a path. HttpError if there is none."""
    allowed: list[str] = []
    for pattern, routes in _ROUTES:
        found = pattern.fullmatch(path)
        if found is None:
            continue
        parts = found.groupdict("")
        for route in routes:
            if route.method == method or (method == "HEAD" and route.method == "GET"):
                if route.rpc == INFER:
                    return Target(route, parts, (parts.get("model", ""), parts.get("version", "")))
                return Target(route, parts)
            allowed.append(route.method)
    if allowed:
        raise HttpError(405, "Method Not Allowed", headers=f"Allow: {', '.join(allowed)}\r\n")
    raise HttpError(404, "Not Found")


def path_of(route: Route) -> str:
    """Return the path of the gRPC method that a route calls, by which roles are looked up."""
    return f"/{SERVICE_NAME}/{route.rpc}"


def fields_of(body: bytes) -> _Fields:
    """Return the JSON object in a body; an empty one if the body is empty. HttpError if it is no object."""
    if not body:
        return {}
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(fields, dict):
        raise HttpError(400, "the body must be a JSON object")
    return fields


def _with(kind: Any, **names: str) -> Callable[[Mapping[str, str], _Fields], Any]:
    """Return a function that makes a message of this kind, whose fields are parts of the path with these names."""
    return lambda parts, fields: kind(**{field: parts.get(part, "") for field, part in names.items()})


def _json(message: Any, parts: Mapping[str, str]) -> bytes:
    return json_response(_dict(message))


def _empty(message: Any, parts: Mapping[str, str]) -> bytes:
    return response(200, b"")


def _live(message: Any, parts: Mapping[str, str]) -> bytes:
    return json_response({"live": message.live})


def _ready(message: Any, parts: Mapping[str, str]) -> bytes:
    # KServe's client reads the body, Triton's the status.
    answer = (
        {"name": parts["model"], "ready": message.ready} if "model" in parts else {"ready": message.ready}
    )
    return json_response(answer, 200 if message.ready else 503)


def _names(message: Any, parts: Mapping[str, str]) -> bytes:
    ready = [model.name for model in message.models if model.state == "READY"]
    return json_response({"models": list(dict.fromkeys(ready))})


def _list(field: str) -> Callable[[Any, Mapping[str, str]], bytes]:
    """Return a function that answers with the list, or with the values of the map, in a field."""

    def answer(message: Any, parts: Mapping[str, str]) -> bytes:
        listed = _dict(message).get(field, [])
        return json_response(list(listed.values()) if isinstance(listed, dict) else listed)

    return answer


def _config(message: Any, parts: Mapping[str, str]) -> bytes:
    return json_response(_dict(message)["config"])


def _settings(message: Any, parts: Mapping[str, str]) -> bytes:
    """Answer with trace settings, whose values are texts, or lists of texts where Triton has lists."""
    settings = {
        name: list(each.value) if name == "trace_level" else ",".join(each.value)
        for name, each in message.settings.items()
    }
    return json_response(settings)


def _logging(message: Any, parts: Mapping[str, str]) -> bytes:
    return json_response({name: value_of(each) for name, each in message.settings.items()})


def _dict(message: Any) -> dict[str, Any]:
    """Return a message as JSON has it, with numbers as numbers: protobuf's own form has 64-bit integers as texts."""
    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _restore_integers(fields, message.DESCRIPTOR)
    return fields


def _restore_integers(fields: dict[str, Any], descriptor: Any) -> None:
    for name, value in fields.items():
        field = descriptor.fields_by_name.get(name)
        if field is None:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name["value"]
            for key, each in value.items():
                value[key] = _restored(each, entry)
        elif isinstance(value, list):
            fields[name] = [_restored(each, field) for each in value]
        else:
            fields[name] = _restored(value, field)


def _restored(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        _restore_integers(value, field.message_type)
        return value
    is_integer = field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64)
    return int(value) if is_integer and isinstance(value, str) else value


def _index_request(parts: Mapping[str, str], fields: _Fields) -> pb.RepositoryIndexRequest:
    ready = fields.get("ready", False)
    if not isinstance(ready, bool):
        raise HttpError(400, "'ready' must be true or false")
    return pb.RepositoryIndexRequest(ready=ready)


def _load_request(parts: Mapping[str, str], fields: _Fields) -> pb.RepositoryModelLoadRequest:
    request = pb.RepositoryModelLoadRequest(model_name=parts["model"])
    for name, value in _parameters(fields).items():
        if name.startswith("file:") and isinstance(value, str):
            try:
                request.parameters[name].bytes_param = base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                raise HttpError(400, f"parameter {truncate(name)!r} must be base64") from None
        else:
            set_parameter(request.parameters, name, value)
    return request


def _unload_request(parts: Mapping[str, str], fields: _Fields) -> pb.RepositoryModelUnloadRequest:
    request = pb.RepositoryModelUnloadRequest(model_name=parts["model"])
    for name, value in _parameters(fields).items():
        set_parameter(request.parameters, name, value)
    return request


def _parameters(fields: _Fields) -> _Fields:
    parameters = fields.get("parameters", {})
    if not isinstance(parameters, dict):
        raise HttpError(400, "'parameters' must be a JSON object")
    return parameters


def _register_request(parts: Mapping[str, str], fields: _Fields) -> pb.SystemSharedMemoryRegisterRequest:
    request = pb.SystemSharedMemoryRegisterRequest(name=parts["region"])
    _fill(request, {name: fields[name] for name in ("key", "offset", "byte_size") if name in fields})
    return request


def _register_cuda_request(parts: Mapping[str, str], fields: _Fields) -> pb.CudaSharedMemoryRegisterRequest:
    handle = fields.get("raw_handle")
    if not isinstance(handle, dict) or not isinstance(handle.get("b64"), str):
        raise HttpError(400, "'raw_handle' must be a JSON object with the handle in base64 as 'b64'")
    try:
        raw = base64.b64decode(handle["b64"], validate=True)
    except (binascii.Error, ValueError):
        raise HttpError(400, "'raw_handle': 'b64' must be base64") from None
    request = pb.CudaSharedMemoryRegisterRequest(name=parts["region"], raw_handle=raw)
    _fill(request, {name: fields[name] for name in ("device_id", "byte_size") if name in fields})
    return request


def _fill(request: Any, values: _Fields) -> None:
    for name, value in values.items():
        try:
            setattr(request, name, value)
        except (TypeError, ValueError):
            raise HttpError(400, f"{name!r} is {truncate(str(value))}, which does not fit") from None


def _trace_request(parts: Mapping[str, str], fields: _Fields) -> pb.TraceSettingRequest:
    request = pb.TraceSettingRequest(model_name=parts.get("model", ""))
    for name, value in fields.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, str) for each in values):
            raise HttpError(
                400, f"trace setting {truncate(name)!r} must be a string, a list of strings, or null"
            )
        request.settings[name].value.extend(values)
    return request


def _logging_request(parts: Mapping[str, str], fields: _Fields) -> pb.LogSettingsRequest:
    request = pb.LogSettingsRequest()
    for name, value in fields.items():
        set_parameter(request.settings, name, value)
    return request


INFER = "ModelInfer"
_ANY, _NUMBER = r"[^/]+", r"[0-9]+"
_MODEL = rf"/v2/models/(?P<model>{_ANY})"
_VERSION = rf"(?:/versions/(?P<version>{_NUMBER}))?"
_BY_NAME = {"name": "model", "version": "version"}


def _memory(kind: str, register: Callable[..., Any]) -> list[tuple[str, list[Route]]]:
    """Return the paths of one kind of shared memory."""
    root = rf"/v2/{kind.lower()}sharedmemory"
    region = rf"(?:/region/(?P<region>{_ANY}))?"
    rpc = f"{kind}SharedMemory"
    status, unregister = (getattr(pb, f"{rpc}{what}Request") for what in ("Status", "Unregister"))
    return [
        (
            rf"{root}{region}/status",
            [Route("GET", f"{rpc}Status", _with(status, name="region"), _list("regions"))],
        ),
        (rf"{root}/region/(?P<region>{_ANY})/register", [Route("POST", f"{rpc}Register", register, _empty)]),
        (
            rf"{root}{region}/unregister",
            [Route("POST", f"{rpc}Unregister", _with(unregister, name="region"), _empty)],
        ),
    ]


def _trace(path: str) -> tuple[str, list[Route]]:
    get = Route("GET", "TraceSetting", lambda parts, fields: _trace_request(parts, {}), _settings)
    return path, [get, Route("POST", "TraceSetting", _trace_request, _settings)]


_metadata = Route("GET", "ModelMetadata", _with(pb.ModelMetadataRequest, **_BY_NAME), _json)
_stats = Route("GET", "ModelStatistics", _with(pb.ModelStatisticsRequest, **_BY_NAME), _json)
_live_route = Route("GET", "ServerLive", _with(pb.ServerLiveRequest), _live)
_ready_route = Route("GET", "ServerReady", _with(pb.ServerReadyRequest), _ready)
_infer = Route("POST", INFER, _with(pb.ModelInferRequest), _empty)

_ROUTES = [
    (re.compile(pattern), routes)
    for pattern, routes in (
        (rf"{_MODEL}{_VERSION}/infer", [_infer]),
        (r"/v2/?", [Route("GET", "ServerMetadata", _with(pb.ServerMetadataRequest), _json)]),
        (r"/v2/health/live", [_live_route]),
        (r"/v2/health/ready", [_ready_route]),
        (r"/ping", [_ready_route]),
        (r"/v2/models/?", [Route("GET", "RepositoryIndex", _with(pb.RepositoryIndexRequest), _names)]),
        (r"/v2/models/stats", [_stats]),
        (rf"{_MODEL}{_VERSION}", [_metadata]),
        (
            rf"{_MODEL}{_VERSION}/ready",
            # An unknown model is 404 here, but "not ready" over gRPC.
            [Route("GET", "ModelReady", _with(pb.ModelReadyRequest, **_BY_NAME), _ready, "ModelMetadata")],
        ),
        (
            rf"{_MODEL}{_VERSION}/config",
            [Route("GET", "ModelConfig", _with(pb.ModelConfigRequest, **_BY_NAME), _config)],
        ),
        (rf"{_MODEL}{_VERSION}/stats", [_stats]),
        (r"/v2/repository/index", [Route("POST", "RepositoryIndex", _index_request, _list("models"))]),
        (
            rf"/v2/repository/models/(?P<model>{_ANY})/load",
            [Route("POST", "RepositoryModelLoad", _load_request, _empty)],
        ),
        (
            rf"/v2/repository/models/(?P<model>{_ANY})/unload",
            [Route("POST", "RepositoryModelUnload", _unload_request, _empty)],
        ),
        *_memory("System", _register_request),
        *_memory("Cuda", _register_cuda_request),
        _trace(r"/v2/trace/setting"),
        _trace(rf"{_MODEL}/trace/setting"),
        (
            r"/v2/logging",
            [
                Route("GET", "LogSettings", _with(pb.LogSettingsRequest), _logging),
                Route("POST", "LogSettings", _logging_request, _logging),
            ],
        ),
    )
]
