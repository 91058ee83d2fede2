"""Conversion of arrays to `ModelInferRequest`, and of `ModelInferResponse` to arrays.

Pure functions and immutable records, thread-safe.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc

from tensorferry.client import errors
from tensorferry.client.errors import InferenceError, InvalidInput
from tensorferry.client.messages import arguments, checks, frames
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.client.messages.results import Classification, InferenceResult, Parameter
from tensorferry.client.messages.several_answers import take_several
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array


class Columns(Protocol):
    """A pandas DataFrame or a pyarrow table."""

    @property
    def columns(self) -> Any:
        """The columns, or their names."""


Inputs = Mapping[str, object] | Columns
# Names of outputs, or how each is returned: its values for None.
Outputs = Sequence[str] | Mapping[str, Classification | None]


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request of a stream, with more than its inputs.

    `inputs` is as for `infer`. A `request_id` of "" is replaced by a generated one. `outputs` and
    `parameters` override those given to `stream`.

    >>> request = StreamRequest({"image": np.zeros((1, 8, 8), np.uint8)}, request_id="first")
    >>> [result.id for result in client.stream("digits", [request])]
    ['first']
    """

    inputs: Inputs
    request_id: str = ""
    outputs: Outputs | None = None
    parameters: Mapping[str, Parameter] | None = None


class StreamDefaults:
    """Defaults for the requests of one stream."""

    def __init__(self, outputs: Outputs | None, parameters: Mapping[str, Parameter] | None) -> None:
        _check_choices(outputs, parameters)
        self._outputs = outputs
        self._parameters = parameters
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count(1)

    def complete(self, request: Inputs | StreamRequest) -> StreamRequest:
        """Return the request with an id, and with the stream's outputs and parameters as defaults."""
        request = frames.frame_of(request)
        if isinstance(request, Mapping):
            request = StreamRequest(request)
        if not isinstance(request, StreamRequest):
            raise InvalidInput(
                "each request of a stream",
                "a dict of input name to array, or a StreamRequest",
                arguments.shown(request),
                "yield {'input name': array}",
            )
        return request_of(
            request.inputs,
            request.request_id or f"{self._prefix}-{next(self._numbers)}",
            self._outputs if request.outputs is None else request.outputs,
            self._parameters if request.parameters is None else request.parameters,
        )


def request_of(
    inputs: Inputs,
    request_id: str | None,
    outputs: Outputs | None,
    parameters: Mapping[str, Parameter] | None,
) -> StreamRequest:
    """Return a request with checked types; arrays and names are compared with the model later."""
    inputs = arguments.mapping("inputs", frames.frame_of(inputs), "write {'input name': array}")
    if request_id is not None:
        arguments.text("request_id", request_id, expected="a str, or None")
    _check_choices(outputs, parameters)
    return StreamRequest(inputs, request_id or "", outputs, parameters)


def iterated(requests: Iterable[Inputs | StreamRequest]) -> Iterator[Inputs | StreamRequest]:
    """Return an iterator over a stream's requests; raise InvalidInput for a single request."""
    if not isinstance(requests, (str, bytes, Mapping)):
        try:
            return iter(requests)
        except TypeError:
            pass
    single = isinstance(requests, Mapping)
    change = "write [inputs] for one" if single else "give a list or a generator of dicts"
    raise InvalidInput("requests", "an iterable of dicts", arguments.shown(requests), change)


def _check_choices(outputs: object, parameters: object) -> None:
    arguments.names("outputs", outputs)
    for name, choice in outputs.items() if isinstance(outputs, Mapping) else ():
        if not isinstance(choice, (Classification, type(None))):
            change = f"write {{{name!r}: Classification(3)}}"
            raise InvalidInput(
                f"output {name!r}", "a Classification, or None", arguments.shown(choice), change
            )
    if parameters is not None:
        arguments.mapping("parameters", parameters, "write {'name': value}")


def encode(
    model: str,
    version: str,
    request: StreamRequest,
    metadata: ModelMetadata | None,
) -> pb.ModelInferRequest:
    """Return the message of a request, with raw tensors.

    Raises InvalidInput if the request does not fit `metadata`. If `metadata` is None, only the
    datatypes of the arrays are checked.
    """
    # `request_of` has made a mapping of them.
    inputs = cast("Mapping[str, object]", request.inputs)
    try:
        if metadata is None and isinstance(inputs, frames.Frame):
            expected, change = "a dict of arrays, because check=False", "leave check=False out of the client"
            raise InvalidInput("inputs", expected, "a data frame", change)
        if metadata is None:
            arrays = {name: checks.array_of(name, value) for name, value in inputs.items()}
        else:
            arrays = checks.check_inputs(inputs, metadata)
            checks.check_outputs(request.outputs or (), metadata)
        message = pb.ModelInferRequest(model_name=model, model_version=version, id=request.request_id)
        for name, array in arrays.items():
            message.inputs.add(name=name, datatype=tensors.datatype_of(array), shape=array.shape)
            message.raw_input_contents.append(_raw(name, array))
        for name in request.outputs or ():
            output = message.outputs.add(name=name)
            choice = request.outputs[name] if isinstance(request.outputs, Mapping) else None
            if choice is not None:
                output.parameters["classification"].int64_param = choice.count
        for name, value in (request.parameters or {}).items():
            _set_parameter(message.parameters[name], name, value)
        if metadata is not None:
            take_several(message, metadata)
    except InvalidInput as error:
        raise InvalidInput(
            error.subject, error.expected, error.received, error.change, request.request_id
        ) from None
    return message


def decode(message: pb.ModelInferResponse) -> InferenceResult:
    """Return the result in an answer, with raw or typed tensors; raise Internal if it is malformed."""
    raw = message.raw_output_contents
    if raw and len(raw) != len(message.outputs):
        text = f"the answer has {len(message.outputs)} outputs and {len(raw)} raw contents"
        raise errors.Internal(grpc.StatusCode.INTERNAL, text, message.id)
    outputs: dict[str, Array] = {}
    for tensor, contents in itertools.zip_longest(message.outputs, raw):
        try:
            kind = tensors.datatype(tensor.datatype)
            if raw:
                array = tensors.decode_raw(contents, kind, tensor.shape)
            else:
                array = tensors.decode_contents(tensor.contents, kind, tensor.shape)
            if tensor.name in outputs:
                raise tensors.TensorError("it occurs more than once")
            outputs[tensor.name] = tensors.values(array, kind.name)
        except tensors.TensorError as error:
            text = f"output {tensor.name!r} of the answer cannot be decoded: {error}"
            raise errors.Internal(grpc.StatusCode.INTERNAL, text, message.id) from None
    parameters = {name: _parameter(value) for name, value in message.parameters.items()}
    return InferenceResult(message.model_name, message.model_version, message.id, parameters, outputs)


def decode_stream(message: pb.ModelStreamInferResponse) -> InferenceResult | InferenceError:
    """Return the outcome of one request of a stream: its result, or its error, after which the stream continues."""
    answer = message.infer_response
    if message.error_message:
        code_name = answer.parameters[errors.STATUS_PARAMETER].string_param
        code = grpc.StatusCode.__members__.get(code_name, grpc.StatusCode.UNKNOWN)
        milliseconds = answer.parameters[errors.RETRY_PARAMETER].int64_param
        retry_after = errors.plausible_pause(milliseconds / 1000) if milliseconds > 0 else None
        return errors.of_code(code, message.error_message, answer.id, retry_after)
    try:
        return decode(answer)
    except InferenceError as error:
        return error


def _raw(name: str, array: Array) -> bytes:
    try:
        return tensors.encode_raw(array)
    except tensors.TensorError as error:
        raise InvalidInput(
            f"input {name!r}", "elements that can be encoded", str(array.dtype), str(error)
        ) from None


def _set_parameter(target: pb.InferParameter, name: str, value: object) -> None:
    # bool comes first, because it is a subclass of int.
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        target.int64_param = value
    elif isinstance(value, int) and 0 <= value < 2**64:
        target.uint64_param = value
    elif isinstance(value, float):
        target.double_param = value
    elif isinstance(value, str):
        target.string_param = arguments.text(f"parameter {name!r}", value)
    else:
        raise InvalidInput(
            f"parameter {name!r}",
            "a bool, an int of at most 64 bits, a float or a str",
            f"{value!r} of type {type(value).__name__}",
            "convert it to one of these",
        )


def _parameter(parameter: pb.InferParameter) -> Parameter:
    choice = parameter.WhichOneof("parameter_choice")
    value: Parameter = getattr(parameter, choice) if choice else ""
    return value
