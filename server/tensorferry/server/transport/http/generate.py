"""Triton's generate extension: inputs and outputs as fields of flat JSON objects, and answers as server-sent events.

Its rules are those of the extension's page in Triton's documentation (extension_generate.md). A field with the name of an input
is that input, others are parameters. In the answer, an output with one value is that value, others are lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.reply import Piece
from tensorferry.server.transport.http.answers import EVENTS, dumps, response
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.infer_requests import Describe, Model
from tensorferry.server.transport.http.json_values import (
    checked_string,
    fields_of,
    json_values,
    object_in,
    raw_contents,
    set_parameter,
)


class GenerateForm(NamedTuple):
    """How the answers of a generate request are written: as `events`, or the only one as JSON."""

    events: bool

    def response(self, pieces: Sequence[Piece]) -> bytes:
        """Return the HTTP response for the only ModelInferResponse. HttpError if JSON cannot have its values."""
        if self.events:
            return response(200, self.event(pieces), EVENTS)
        return response(200, _json_of(pieces))

    def event(self, pieces: Sequence[Piece]) -> bytes:
        """Return the event for a ModelInferResponse in pieces. HttpError if JSON cannot have its values."""
        return b"data: " + _json_of(pieces) + b"\n\n"


def error_event(text: str) -> bytes:
    """Return the event of an error after the first event."""
    return b"data: " + dumps({"error": text}) + b"\n\n"


def generate_request(describe: Describe, model: Model, body: bytes) -> bytes:
    """Return the serialised ModelInferRequest. HttpError if the body does not fit the model, and what `describe` raises."""
    fields = fields_of(body)
    metadata = describe(*model)
    given: Mapping[str, Any] = {**object_in(fields, "parameters"), **fields}
    message = pb.ModelInferRequest(
        model_name=model[0], model_version=model[1], id=checked_string("id", fields.get("id", ""))
    )
    inputs = {spec.name: spec for spec in metadata.inputs}
    for name, value in given.items():
        if name in inputs:
            _add_input(message, inputs[name], value)
        elif name not in ("id", "parameters"):
            set_parameter(message.parameters, name, value)
    return message.SerializeToString()


def _add_input(message: pb.ModelInferRequest, spec: Any, value: Any) -> None:
    """Add an input: of one value or a flat list with ones as its first dimensions, of a nested list with that shape."""
    shape = _shape_of(spec.name, value)
    if len(shape) < 2:
        shape = [*[1] * (len(spec.shape) - 1), math.prod(shape)] if spec.shape else []
    message.inputs.add(name=spec.name, datatype=spec.datatype, shape=shape)
    values = value if isinstance(value, list) else [value]
    message.raw_input_contents.append(raw_contents(spec.name, spec.datatype, shape, values))


def _shape_of(name: str, value: Any) -> list[int]:
    """Return the shape of nested lists. HttpError unless all lists of a dimension have the same length."""
    shape: list[int] = []
    values = [value]
    while list in (kinds := set(map(type, values))):
        lengths = {len(each) for each in values} if kinds == {list} else set()
        if len(lengths) != 1:
            found = (
                f"lists of {min(lengths)} to {max(lengths)} values" if lengths else "both lists and values"
            )
            raise HttpError(
                400,
                f"input {name!r} has {found} in dimension {len(shape)}; all must be lists of the same length",
            )
        shape.append(lengths.pop())
        values = list(chain.from_iterable(values))
    return shape


def _json_of(pieces: Sequence[Piece]) -> bytes:
    message = pb.ModelInferResponse.FromString(b"".join(pieces))
    answer: dict[str, Any] = {"model_name": message.model_name, "model_version": message.model_version}
    if message.id:
        answer["id"] = message.id
    for tensor, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        values = json_values(tensor.name, tensor.datatype, tensor.shape, raw)
        answer[tensor.name] = values[0] if len(values) == 1 else values
    return dumps(answer)
