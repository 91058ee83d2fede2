"""A dict of arrays ↔ `ModelInferRequest` and `ModelInferResponse`.

Pure functions and immutable records; they may be used from any thread.
"""

from __future__ import annotations

import itertools
import reprlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import grpc

from tensorferry.client import errors
from tensorferry.client.errors import InferenceError, InvalidInput
from tensorferry.client.messages import arguments, checks
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

Parameter = bool | int | float | str

# As many outputs and parameters, and as long strings, as the repr of a result shows.
_SHOWN = 20
_short = reprlib.Repr()
_short.maxdict = _SHOWN
_short.maxstring = _short.maxother = 120


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request of a stream, where a dict of inputs alone does not say enough.

    `inputs` is as for `infer`. A `request_id` of "" has one generated. `outputs` and
    `parameters`, where given, take the place of those given to `stream`.
    """

    inputs: Mapping[str, object]
    request_id: str = ""
    outputs: Sequence[str] | None = None
    parameters: Mapping[str, Parameter] | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class InferenceResult(Mapping[str, Array]):
    """One answer: a mapping of output name to numpy array, in the server's order.

    Numbers and bools have their numpy dtype, BF16 is `ml_dtypes.bfloat16`, BYTES an object
    array of `bytes`. Arrays of a fixed width are read-only views of the received message:
    copy one to write to it. `id` is the request's id, "" when it had none.
    """

    model_name: str
    model_version: str
    id: str
    parameters: Mapping[str, Parameter]
    outputs: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        tensors = [
            f"{_short.repr(name)}: {_described(array)}"
            for name, array in itertools.islice(self.items(), _SHOWN)
        ]
        if len(self) > _SHOWN:
            tensors.append(f"and {len(self) - _SHOWN} more")
        head = f"InferenceResult(model_name={_short.repr(self.model_name)}, model_version={_short.repr(self.model_version)}"
        return (
            f"{head}, id={_short.repr(self.id)}, outputs={{{', '.join(tensors)}}},"
            f" parameters={_short.repr(dict(self.parameters))})"
        )


class StreamDefaults:
    """What the requests of one stream have in common; fills in what each leaves out."""

    def __init__(self, outputs: Sequence[str] | None, parameters: Mapping[str, Parameter] | None) -> None:
        _check_choices(outputs, parameters)
        self._outputs = outputs
        self._parameters = parameters
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count(1)

    def complete(self, request: Mapping[str, object] | StreamRequest) -> StreamRequest:
        """The request with an id, and with the stream's outputs and parameters where it has none."""
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
    inputs: Mapping[str, object],
    request_id: str | None,
    outputs: Sequence[str] | None,
    parameters: Mapping[str, Parameter] | None,
) -> StreamRequest:
    """A request with checked types; its arrays and names are held against the model later."""
    arguments.mapping("inputs", inputs, "write {'input name': array}")
    if request_id is not None:
        arguments.text("request_id", request_id, expected="a str, or None")
    _check_choices(outputs, parameters)
    return StreamRequest(inputs, request_id or "", outputs, parameters)


def iterated(
    requests: Iterable[Mapping[str, object] | StreamRequest],
) -> Iterator[Mapping[str, object] | StreamRequest]:
    """The iterator of a stream's requests; InvalidInput for what is none, or is one request."""
    if not isinstance(requests, (str, bytes, Mapping)):
        try:
            return iter(requests)
        except TypeError:
            pass
    raise not_iterable(requests)


def not_iterable(requests: object) -> InvalidInput:
    """The error for what a stream cannot take its requests from."""
    change = (
        "write [inputs] for one" if isinstance(requests, Mapping) else "give a list or a generator of dicts"
    )
    return InvalidInput("requests", "an iterable of dicts", arguments.shown(requests), change)


def _check_choices(outputs: object, parameters: object) -> None:
    arguments.names("outputs", outputs)
    if parameters is not None:
        arguments.mapping("parameters", parameters, "write {'name': value}")


def encode(
    model: str,
    version: str,
    request: StreamRequest,
    metadata: ModelMetadata | None,
) -> pb.ModelInferRequest:
    """The message of a request, every tensor raw.

    InvalidInput when the request does not fit `metadata`; with None nothing is checked but
    that the arrays have a datatype.
    """
    try:
        if metadata is None:
            arrays = {name: checks.array_of(name, value) for name, value in request.inputs.items()}
        else:
            arrays = checks.check_inputs(request.inputs, metadata)
            checks.check_outputs(request.outputs or (), metadata)
        message = pb.ModelInferRequest(model_name=model, model_version=version, id=request.request_id)
        for name, array in arrays.items():
            message.inputs.add(name=name, datatype=tensors.datatype_of(array), shape=array.shape)
            message.raw_input_contents.append(_raw(name, array))
        for name in request.outputs or ():
            message.outputs.add(name=name)
        for name, value in (request.parameters or {}).items():
            _set_parameter(message.parameters[name], name, value)
    except InvalidInput as error:
        raise InvalidInput(
            error.subject, error.expected, error.received, error.change, request.request_id
        ) from None
    return message


def decode(message: pb.ModelInferResponse) -> InferenceResult:
    """The result in an answer, its tensors raw or typed; Internal when it is malformed."""
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
            outputs[tensor.name] = tensors.values(array, kind.name)
        except tensors.TensorError as error:
            text = f"output {tensor.name!r} of the answer cannot be decoded: {error}"
            raise errors.Internal(grpc.StatusCode.INTERNAL, text, message.id) from None
    parameters = {name: _parameter(value) for name, value in message.parameters.items()}
    return InferenceResult(message.model_name, message.model_version, message.id, parameters, outputs)


def decode_stream(message: pb.ModelStreamInferResponse) -> InferenceResult | InferenceError:
    """What became of one request of a stream: its result, or the error that it met."""
    answer = message.infer_response
    if message.error_message:
        code_name = answer.parameters[errors.STATUS_PARAMETER].string_param
        milliseconds = answer.parameters[errors.RETRY_PARAMETER].int64_param
        retry_after = errors.believed(milliseconds / 1000) if milliseconds > 0 else None
        return errors.from_stream(message.error_message, code_name, answer.id, retry_after)
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
    # bool comes first: it is an int, too.
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


def _described(array: Array) -> str:
    """Datatype and shape, never values."""
    return f"{tensors.datatype_of(array)} {list(array.shape)}"


def _parameter(parameter: pb.InferParameter) -> Parameter:
    choice = parameter.WhichOneof("parameter_choice")
    value: Parameter = getattr(parameter, choice) if choice else ""
    return value
