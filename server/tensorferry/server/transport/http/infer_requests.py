"""Inference requests of the v2 protocol: from a JSON head with binary tensors to a serialised ModelInferRequest.

The rules are those of Triton's extensions of the Open Inference Protocol: binary tensor data, classification, parameters,
shared memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.json_values import (
    Fields,
    checked_boolean,
    checked_string,
    fields_of,
    object_in,
    raw_contents,
    set_parameter,
)
from tensorferry.server.wire import bounds
from tensorferry.server.wire.fields import DELIMITED, encode_varint

_ID_TAG, _RAW_TAG = (
    bytes([pb.ModelInferRequest.DESCRIPTOR.fields_by_name[name].number << 3 | DELIMITED])
    for name in ("id", "raw_input_contents")
)
# The start of a JSON object whose first member is the id, as Triton's clients write it. The rest is kept without it,
# because each request has an id of its own.
_ID_FIRST = re.compile(rb'\{"id": ?"([ !#-\[\]-~]*)"(,)')
# Plans that are kept, and the largest JSON head for which one is.
_MAX_KEPT, _MAX_KEPT_BYTES = 256, 4 << 10
_SHARED = "shared_memory_region"
_ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', 'shared_memory_region' in "
    "'parameters'. But {} set"
)

Model = tuple[str, str]
Describe = Callable[[str, str], pb.ModelMetadataResponse]


class AnswerForm(NamedTuple):
    """How the outputs of an answer are written: `all_binary`, or those of them; `shared` go to shared memory, others are JSON."""

    all_binary: bool = False
    binary: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()

    def is_binary(self, output: str) -> bool:
        """Return whether an output is binary."""
        return self.all_binary or output in self.binary


class _Plan(NamedTuple):
    """What the JSON head of a request stands for: the message without its id, and how its tensors follow.

    `raws` has, for each tensor that is not in shared memory, the tag and the size, and the contents if they were JSON.
    """

    message: bytes
    raws: tuple[tuple[bytes, int, bytes | None], ...]
    binary_bytes: int
    form: AnswerForm


class RequestTranslator:
    """Translates requests, and keeps what was parsed once, by the bytes of the JSON head. Thread-safe.

    `describe` returns the metadata of a model by name and version.
    """

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        # Needs no lock, because threads can only replace a value by an equal one.
        self._plans: dict[tuple[Model, bytes], _Plan] = {}

    def message(self, model: Model, body: bytes, json_length: int | None) -> tuple[bytes, AnswerForm]:
        """Return the serialised ModelInferRequest and how its answer is written.

        `json_length` is the header Inference-Header-Content-Length, None without it. HttpError if the body is malformed,
        UnicodeEncodeError if a text has half a surrogate pair, and what `describe` raises for a body of only one tensor.
        """
        size = len(body) if json_length is None else json_length
        if size > len(body):
            raise HttpError(
                400, f"Inference-Header-Content-Length is {size}, but the body has only {len(body)} bytes"
            )
        if json_length == 0:
            return _one_tensor(self._describe(*model), model, body), AnswerForm(all_binary=True)
        found = _ID_FIRST.match(body, 0, size)
        request_id, rest = (found[1], body[found.end() - 1 : size]) if found else (b"", body[:size])
        plan = self._plans.get((model, rest))
        if plan is None:
            plan, given_id = _plan_of(model, body[:size])
            if not found:
                request_id = given_id
            kept = len(rest) <= _MAX_KEPT_BYTES and (found or not given_id)
            if kept and all(contents is None for _, _, contents in plan.raws):
                if len(self._plans) >= _MAX_KEPT:
                    self._plans.clear()
                self._plans[model, rest] = plan
        binary = len(body) - size
        if binary > plan.binary_bytes:
            raise HttpError(400, f"unexpected additional input data: {binary - plan.binary_bytes} bytes")
        if binary < plan.binary_bytes:
            raise HttpError(
                400, f"unexpected end of the body: expecting {plan.binary_bytes - binary} additional bytes"
            )
        # The fields of a message may come in any order.
        pieces, at = [plan.message], size
        if request_id:
            pieces = [_ID_TAG, encode_varint(len(request_id)), request_id, plan.message]
        for tag, nbytes, contents in plan.raws:
            pieces.append(tag)
            if contents is None:
                pieces.append(body[at : at + nbytes])
                at += nbytes
            else:
                pieces.append(contents)
        return b"".join(pieces), plan.form


def _plan_of(model: Model, head: bytes) -> tuple[_Plan, bytes]:
    """Return the plan of a JSON head, and the request's id."""
    request = fields_of(head)
    request_id = checked_string("id", request.get("id", ""))
    message = pb.ModelInferRequest(model_name=model[0], model_version=model[1])
    all_binary = False
    for name, value in object_in(request, "parameters").items():
        if name == "binary_data_output":
            all_binary = checked_boolean(name, value)
        else:
            set_parameter(message.parameters, name, value)
    raws: list[tuple[bytes, int, bytes | None]] = []
    binary_bytes = 0
    for tensor in _objects(request, "inputs", required=True):
        contents = _add_input(message, tensor)
        if contents is not None:
            given = contents if isinstance(contents, bytes) else None
            nbytes = contents if isinstance(contents, int) else len(contents)
            raws.append((_RAW_TAG + encode_varint(nbytes), nbytes, given))
            binary_bytes += 0 if given is not None else nbytes
    binary, shared = set(), set()
    outputs = _objects(request, "outputs")
    for output in outputs:
        name, parameters = _text(output, "name", "an output"), dict(object_in(output, "parameters"))
        if checked_boolean("binary_data", parameters.pop("binary_data", False)):
            binary.add(name)
        if _SHARED in parameters:
            shared.add(name)
        if parameters.get("classification") and name in shared:
            raise HttpError(400, "shared memory can't be used for classification outputs")
        if name in binary & shared:
            raise HttpError(400, "shared memory and 'binary_data' can't be set for the same output")
        added = message.outputs.add(name=name)
        for key, value in parameters.items():
            set_parameter(added.parameters, key, value)
    if outputs:
        # As in Triton, an output that is named is binary only if it says so itself.
        all_binary = len(binary) == len(outputs)
    form = AnswerForm(all_binary, frozenset(binary), frozenset(shared))
    return _Plan(message.SerializeToString(), tuple(raws), binary_bytes, form), request_id.encode()


def _add_input(message: pb.ModelInferRequest, tensor: Fields) -> bytes | int | None:
    """Add an input; return its raw contents, or their size in the binary part, or None if it is in shared memory."""
    name, kind = _text(tensor, "name", "an input"), _text(tensor, "datatype", "an input")
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(dim) is int and 0 <= dim < 1 << 63 for dim in shape):
        raise HttpError(400, f"input {name!r}: 'shape' must be a list of integers of at least 0")
    if len(shape) > bounds.MAX_DIMENSIONS:
        # Checked here too, because the product of many dimensions takes minutes.
        raise HttpError(
            400,
            f"input {name!r}: 'shape' has {len(shape)} dimensions, at most {bounds.MAX_DIMENSIONS} are allowed",
        )
    parameters = dict(object_in(tensor, "parameters"))
    size = parameters.pop("binary_data_size", None)
    added = message.inputs.add(name=name, datatype=kind, shape=shape)
    for key, value in parameters.items():
        set_parameter(added.parameters, key, value)
    # KServe's client sends null beside the size 0 of an empty input.
    data = tensor.get("data")
    sources = (data is not None) + (size is not None) + (_SHARED in parameters)
    if sources != 1:
        raise HttpError(
            400,
            _ONE_SOURCE.format("no field is" if not sources else "multiple fields are") + f" for {name!r}",
        )
    if data is not None:
        return raw_contents(name, kind, shape, data)
    if size is not None and (type(size) is not int or not 0 <= size < 1 << 31):
        raise HttpError(400, f"input {name!r}: 'binary_data_size' must be a number of bytes")
    return size


def _one_tensor(metadata: pb.ModelMetadataResponse, model: Model, body: bytes) -> bytes:
    """Return the request whose body is its only input, as the header Inference-Header-Content-Length: 0 says."""
    if len(metadata.inputs) != 1:
        raise HttpError(
            400,
            f"a raw binary request has one input, but model {model[0]!r} has {len(metadata.inputs)}: send a JSON head",
        )
    (spec,) = metadata.inputs
    # A batch of one row, if the first dimension is variable.
    shape = [1 if not at and dim < 0 else dim for at, dim in enumerate(spec.shape)]
    size = DATATYPES[spec.datatype].size
    if not size:
        if math.prod(abs(dim) for dim in shape) != 1:
            raise HttpError(
                400, f"a raw binary request for input {spec.name!r} of BYTES must have one element"
            )
        shape = [1] * len(shape)
    elif shape.count(-1) > 1:
        raise HttpError(400, f"input {spec.name!r} has more than one variable dimension: send a JSON head")
    else:
        fixed = size * math.prod(dim for dim in shape if dim >= 0)
        if not fixed or len(body) % fixed or (-1 not in shape and len(body) != fixed):
            raise HttpError(
                400, f"input {spec.name!r} of shape {list(spec.shape)} cannot have {len(body)} bytes"
            )
        shape = [len(body) // fixed if dim < 0 else dim for dim in shape]
    request = pb.ModelInferRequest(model_name=model[0], model_version=model[1], raw_input_contents=[body])
    request.inputs.add(name=spec.name, datatype=spec.datatype, shape=shape)
    return request.SerializeToString()


def _text(of: Fields, name: str, what: str) -> str:
    value = of.get(name)
    if not isinstance(value, str):
        raise HttpError(400, f"{what} of the request has no string {name!r}")
    return value


def _objects(of: Fields, name: str, *, required: bool = False) -> Sequence[Fields]:
    value = of.get(name, None if required else [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise HttpError(400, f"Unable to parse {name!r}: it must be a list of JSON objects")
    return value
