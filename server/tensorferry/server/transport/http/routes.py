"""Paths of the v2 protocol: each fills the request message of its gRPC method, whose handler answers it.

The paths are those of Triton and KServe; SageMaker uses /ping and /invocations. Those of text endpoints are OpenAI's, those of Text
Embeddings Inference, and those of rerankers.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict

from tensorferry.protos import SERVICE_NAME
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import truncate
from tensorferry.server.identity import CONTROL
from tensorferry.server.security.method_roles import required_role
from tensorferry.server.system.addresses import names_this_machine
from tensorferry.server.transport.http.answers import json_response, response
from tensorferry.server.transport.http.errors import HttpError, form_of
from tensorferry.server.transport.http.generate import GenerateForm
from tensorferry.server.transport.http.heads import Routed
from tensorferry.server.transport.http.json_values import Fields, object_in, quoted, set_parameter, value_of
from tensorferry.server.transport.http.text import openai, rerank, tei
from tensorferry.server.transport.http.text.text_call import TextEndpoints
from tensorferry.serving.text_tasks import CLASSIFY, EMBEDDING, RERANK

INFER = "ModelInfer"
_PATHS = "GET /v2/models lists the models, and POST /v2/models/NAME/infer runs one"
_BOOLEAN = "true or false"
_WANTED = {
    FieldDescriptor.TYPE_BOOL: _BOOLEAN,
    FieldDescriptor.TYPE_STRING: "a string",
    FieldDescriptor.TYPE_INT64: "an integer",
    FieldDescriptor.TYPE_UINT64: "an integer of at least 0",
}
Answer = Callable[[Any, Mapping[str, str]], bytes]
Fill = Callable[[Any, Fields], None]


class Route(NamedTuple):
    """What is done for one method of HTTP on one form of path.

    `rpc` is the method of the protocol, whose message gets the parts of the path as fields and is filled with the JSON body by
    `fill`. `answer` returns the HTTP response for its result. With `known`, an unknown model is an error. With `describes`,
    the method is not called, and the answer gets the metadata of the models that are ready. `form` is that of an inference
    whose body is JSON alone: what parses one on texts, or how the generate extension answers.
    """

    method: str
    rpc: str
    answer: Answer
    fill: Fill | None = None
    known: bool = False
    describes: bool = False
    form: TextEndpoints | GenerateForm | None = None


class Target(NamedTuple):
    """The route of a request and the parts of its path."""

    route: Route
    parts: Mapping[str, str]


def target_of(method: str, path: str) -> Target:
    """Return what serves a method and a path. HttpError if there is none."""
    allowed: list[str] = []
    for pattern, route in _ROUTES:
        found = pattern.fullmatch(path)
        if found is None:
            continue
        # After the match, so that a path that a proxy forbids has no second form.
        parts = {name: unquote(part) for name, part in found.groupdict("").items()}
        if route.method == method or (method == "HEAD" and route.method == "GET"):
            return Target(route, parts)
        allowed.append(route.method)
    if allowed:
        methods = ", ".join(allowed)
        reason = f"{truncate(path)} takes {methods}, not {truncate(method)}; {_PATHS}"
        raise HttpError(405, reason, headers=f"Allow: {methods}\r\n")
    raise HttpError(404, f"there is no path {truncate(path)}; {_PATHS}")


def routed(method: str, path: str, fields: Mapping[str, str], *, local: bool = False) -> Routed:
    """Return what serves a request. A `local` server takes only names of this machine as host."""
    try:
        target: Any = target_of(method, path)
        _refuse_web_pages(method, target, fields, local=local)
    except HttpError as error:
        target = error.with_traceback(None)
    return Routed(target, form_of(path))


def _refuse_web_pages(method: str, target: Target, fields: Mapping[str, str], *, local: bool) -> None:
    """Raise HttpError for a request that a web page makes a browser send, as far as it could do harm.

    A page can send POST to any server without asking it. It can read answers of a server on this machine if the name of its
    site resolves to this machine (DNS rebinding), so a `local` server takes only names of this machine.
    """
    if local and not names_this_machine(fields.get("host") or "localhost"):
        raise HttpError(
            403, "use localhost or 127.0.0.1 as host, or start the server with --host or --auth-tokens"
        )
    site = fields.get("sec-fetch-site")
    changes = required_role(path_of(target.route)) == CONTROL
    if method == "POST" and (site == "cross-site" or (changes and (site is not None or "origin" in fields))):
        raise HttpError(
            403, "web pages cannot call this; the request has a browser's header Origin or Sec-Fetch-Site"
        )


def path_of(route: Route) -> str:
    """Return the path of the gRPC method that a route calls, by which roles are looked up."""
    return f"/{SERVICE_NAME}/{route.rpc}"


# Answers.


def _json(message: Any, parts: Mapping[str, str]) -> bytes:
    return json_response(_dict(message))


def _empty(message: Any, parts: Mapping[str, str]) -> bytes:
    return response(200, b"")


def _ready(message: Any, parts: Mapping[str, str]) -> bytes:
    # KServe's client reads the body, Triton's the status.
    name = {"name": parts["name"]} if "name" in parts else {}
    return json_response({**name, "ready": message.ready}, 200 if message.ready else 503)


def _names(found: Sequence[pb.ModelMetadataResponse], parts: Mapping[str, str]) -> bytes:
    return json_response({"models": [model.name for model in found]})


def _regions(message: Any, parts: Mapping[str, str]) -> bytes:
    return json_response(list(_dict(message)["regions"].values()))


def _field(name: str) -> Answer:
    return lambda message, parts: json_response(_dict(message)[name])


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
    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _with_numbers(fields, message.DESCRIPTOR)


def _with_numbers(fields: Mapping[str, Any], descriptor: Any) -> dict[str, Any]:
    return {name: _numbers(value, descriptor.fields_by_name[name]) for name, value in fields.items()}


def _numbers(value: Any, field: Any) -> Any:
    kind = field.message_type
    if isinstance(value, list):
        return [_numbers(each, field) for each in value]
    if kind is None:
        return int(value) if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else value
    if kind.GetOptions().map_entry:
        return {key: _numbers(each, kind.fields_by_name["value"]) for key, each in value.items()}
    return _with_numbers(value, kind)


# Requests.


def _of(*names: str) -> Fill:
    """Return a function that sets the fields with these names."""

    def fill(message: Any, fields: Fields) -> None:
        for name in names:
            if name not in fields:
                continue
            value = fields[name]
            wanted = _WANTED[message.DESCRIPTOR.fields_by_name[name].type]
            try:
                # Protobuf takes a boolean for a number, and a number for a boolean.
                if isinstance(value, bool) != (wanted == _BOOLEAN):
                    raise TypeError
                setattr(message, name, value)
            except (TypeError, ValueError):
                raise HttpError(400, f"{name!r} is {quoted(value)}; it must be {wanted}") from None

    return fill


def _parameters(message: Any, fields: Fields) -> None:
    for name, value in object_in(fields, "parameters").items():
        if name.startswith("file:") and isinstance(value, str):
            message.parameters[name].bytes_param = _base64(value, f"parameter {truncate(name)!r}")
        else:
            set_parameter(message.parameters, name, value)


def _cuda_region(message: Any, fields: Fields) -> None:
    handle = object_in(fields, "raw_handle").get("b64")
    if not isinstance(handle, str):
        raise HttpError(400, "'raw_handle' must be a JSON object with the handle in base64 as 'b64'")
    message.raw_handle = _base64(handle, "'raw_handle': 'b64'")
    _of("device_id", "byte_size")(message, fields)


def _base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise HttpError(400, f"{what} must be base64") from None


def _trace(message: Any, fields: Fields) -> None:
    for name, value in fields.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, str) for each in values):
            raise HttpError(
                400, f"trace setting {truncate(name)!r} must be a string, a list of strings, or null"
            )
        message.settings[name].value.extend(values)


def _log(message: Any, fields: Fields) -> None:
    for name, value in fields.items():
        set_parameter(message.settings, name, value)


def _inference(form: TextEndpoints | GenerateForm | None = None) -> Route:
    return Route("POST", INFER, _empty, form=form)


# Parts of paths have the names of the messages' fields.
_MODEL = r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
# The start of paths of endpoints whose clients cannot name a model.
_NAMED = r"/models/(?P<name>[^/]+)"
_LOADED = r"/v2/repository/models/(?P<model_name>[^/]+)"
_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
_REGION = r"/region/(?P<name>[^/]+)"
_TRACING = r"/v2(?:/models/(?P<model_name>[^/]+))?/trace/setting"

# What TEI does at the root path for each kind of model.
_BY_TASK = {EMBEDDING: tei.embed, CLASSIFY: tei.predict, RERANK: rerank.rerank}

_ROUTES = [
    (re.compile(pattern), route)
    for pattern, route in (
        (f"{_MODEL}/infer", _inference()),
        (f"{_MODEL}/generate", _inference(GenerateForm(events=False))),
        (f"{_MODEL}/generate_stream", _inference(GenerateForm(events=True))),
        ("/invocations", _inference()),
        ("/v2/?", Route("GET", "ServerMetadata", _json)),
        ("/v2/health/live", Route("GET", "ServerLive", _json)),
        ("/v2/health/ready|/ping|/health", Route("GET", "ServerReady", _ready)),
        ("/v2/models/?", Route("GET", "RepositoryIndex", _names, describes=True)),
        (f"/v2/models/stats|{_MODEL}/stats", Route("GET", "ModelStatistics", _json)),
        (_MODEL, Route("GET", "ModelMetadata", _json)),
        # An unknown model is 404 here, but "not ready" over gRPC.
        (f"{_MODEL}/ready", Route("GET", "ModelReady", _ready, known=True)),
        (f"{_MODEL}/config", Route("GET", "ModelConfig", _field("config"))),
        ("/v2/repository/index", Route("POST", "RepositoryIndex", _field("models"), _of("ready"))),
        (f"{_LOADED}/load", Route("POST", "RepositoryModelLoad", _empty, _parameters)),
        (f"{_LOADED}/unload", Route("POST", "RepositoryModelUnload", _empty, _parameters)),
        (f"{_SYSTEM}(?:{_REGION})?/status", Route("GET", "SystemSharedMemoryStatus", _regions)),
        (
            f"{_SYSTEM}{_REGION}/register",
            Route("POST", "SystemSharedMemoryRegister", _empty, _of("key", "offset", "byte_size")),
        ),
        (f"{_SYSTEM}(?:{_REGION})?/unregister", Route("POST", "SystemSharedMemoryUnregister", _empty)),
        (f"{_CUDA}(?:{_REGION})?/status", Route("GET", "CudaSharedMemoryStatus", _regions)),
        (f"{_CUDA}{_REGION}/register", Route("POST", "CudaSharedMemoryRegister", _empty, _cuda_region)),
        (f"{_CUDA}(?:{_REGION})?/unregister", Route("POST", "CudaSharedMemoryUnregister", _empty)),
        (_TRACING, Route("GET", "TraceSetting", _settings)),
        (_TRACING, Route("POST", "TraceSetting", _settings, _trace)),
        ("/v2/logging", Route("GET", "LogSettings", _logging)),
        ("/v2/logging", Route("POST", "LogSettings", _logging, _log)),
        ("/v1/embeddings", _inference(openai.embeddings)),
        ("/v1/models", Route("GET", "RepositoryIndex", openai.models, describes=True)),
        ("/v1/models/(?P<name>.+)", Route("GET", "RepositoryIndex", openai.model, describes=True)),
        (f"(?:{_NAMED})?/embed", _inference(tei.embed)),
        (f"(?:{_NAMED})?/embed_all", _inference(tei.embed_all)),
        # To which clients of Hugging Face send texts.
        (f"(?:{_NAMED})?/", _inference(_BY_TASK)),
        (_NAMED, _inference(_BY_TASK)),
        (f"(?:{_NAMED})?/predict", _inference(tei.predict)),
        (f"(?:{_NAMED})?/tokenize", _inference(tei.tokenize)),
        ("/info", Route("GET", "RepositoryIndex", tei.info, describes=True)),
        (f"(?:/v[12]|{_NAMED})?/rerank", _inference(rerank.rerank)),
        ("(?:/v1)?/score", _inference(rerank.score)),
    )
]
