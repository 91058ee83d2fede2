"""Conversion between protobuf messages and tensors, with every check of what a client sent.

Error messages keep Triton's wording, because clients recognise errors by it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.batcher import BatchInfo, Outcome, RequestTooLarge, Tensor
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import TensorError, encode_contents, encode_raw
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import InvalidRequestError, ModelFailedError, truncate
from tensorferry.server.inference.requests.input_contents import (
    DEFAULT_LIMITS,
    InputMessage,
    check_description,
    check_string_counts,
    decode_input,
    locate_contents,
    rows_first,
)
from tensorferry.server.inference.responses.classification import BYTES, NO_LABELS, Classifier, class_count
from tensorferry.server.inference.shared_memory.regions import RegionLease, Span
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.server.wire.parameters import RequestParameters, read_parameters


class RequestedOutput(NamedTuple):
    """An output, with the number of classes asked for, 0 for its values; and its place in shared memory, None for the response."""

    spec: TensorSpec
    class_count: int = 0
    span: Span | None = None


class ResponseSpec(NamedTuple):
    """Contents of a response, as its request asks for them.

    `typed` asks for typed contents, `explain` for a description of the batch.
    """

    outputs: tuple[RequestedOutput, ...]
    typed: bool
    explain: bool


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A request's tensors in the order of `signature`, with the rows on axis 0, and its parameters.

    `signature` is the model's plus the optional inputs given. `rows` is the size of axis 0, 1 for a model that is not
    batched. Requests with an equal `key` may share a batch. `shared` has the positions of the tensors without rows.
    """

    signature: Signature
    tensors: tuple[Tensor, ...]
    rows: int
    key: Hashable
    shared: frozenset[int]
    nbytes: int
    parameters: RequestParameters
    response_spec: ResponseSpec


def decode_request(
    request: pb.ModelInferRequest,
    model: str,
    signature: Signature,
    batched: bool,
    lease: RegionLease,
    limits: RequestLimits = DEFAULT_LIMITS,
    *,
    message_bytes: int = 0,
    queue_rows: int | None = None,
) -> DecodedRequest:
    """Check a request, whose message had `message_bytes`, against the model's signature and return its tensors.

    `queue_rows` are the rows that the model's queue holds; None does not compare them with the request's.
    Numeric raw contents are not copied: the tensors refer to the request's bytes. Tensors in shared memory are copied.
    The lease gets the regions, and the caller releases it, also after an error. Raises a ServerError, or RequestTooLarge.
    """
    check_string_counts(request)
    parameters = read_parameters(request)
    inputs = _inputs_by_name(request, model, signature)
    signature = signature.with_given_inputs(inputs)
    outputs = _requested_outputs(request, model, signature, lease)
    contents = locate_contents(request, model, lease)
    nbytes = message_bytes + sum([span.nbytes for span in contents.spans.values()])
    # Before any contents are decoded, which takes longer than all else for a large request.
    for spec in signature.inputs:
        shape = inputs[spec.name].shape
        check_description(inputs[spec.name], spec, model, batched)
        rows = shape[spec.batch_axis] if batched and spec.has_row_axis else 0
        if queue_rows is not None and rows > queue_rows:
            raise RequestTooLarge(
                f"input {spec.name!r} has {rows} rows; the queue of model {model!r} holds {queue_rows}: send fewer rows "
                "at once, or start the server with a larger --max-queue-size"
            )
        if 0 < spec.most_bytes < nbytes:
            raise InvalidRequestError(
                f"the request has {nbytes} bytes; model {model!r} takes at most {spec.most_bytes} with its input "
                f"{spec.name!r}, because its time grows with them: send less at once"
            )
    tensors: list[Tensor] = []
    for spec in signature.inputs:
        try:
            tensors.append(rows_first(decode_input(inputs[spec.name], spec, model, contents, limits), spec))
        except TensorError as error:
            raise InvalidRequestError(f"input {spec.name!r} of model {model!r}: {error}") from None
    return DecodedRequest(
        signature,
        tensors=tuple(tensors),
        rows=row_count(tensors, model, signature, limits) if batched else 1,
        key=tuple(tensor.shape[1:] for tensor in tensors),
        shared=signature.shared_inputs(batched=batched),
        nbytes=nbytes,
        parameters=parameters,
        response_spec=ResponseSpec(
            outputs,
            # Clients expect raw contents if no input shows a preference: there are none, or all are in shared memory.
            typed=contents.raws is None and len(contents.spans) < len(inputs),
            explain=parameters.explain,
        ),
    )


def row_count(tensors: Sequence[Tensor], model: str, signature: Signature, limits: RequestLimits) -> int:
    """Return the rows of a request to a batched model, which must be equal for all inputs with rows."""
    with_rows = [
        (spec.name, tensor.shape[0])
        for spec, tensor in zip(signature.inputs, tensors, strict=True)
        if spec.has_row_axis
    ]
    first, rows = with_rows[0]
    if limits.rows and rows > limits.rows:
        raise InvalidRequestError(
            f"the request has {rows} rows; this server takes at most {limits.rows}: send fewer at once, or start it with a "
            "larger --max-request-rows"
        )
    for name, others in with_rows:
        if others != rows:
            raise InvalidRequestError(
                f"input {name!r} batch size does not match other inputs for model {model!r}: {others} rows, {first!r} has "
                f"{rows}"
            )
    return rows


def _inputs_by_name(
    request: pb.ModelInferRequest, model: str, signature: Signature
) -> Mapping[str, InputMessage]:
    inputs: dict[str, InputMessage] = {}
    for tensor in request.inputs:
        if tensor.name in inputs:
            raise InvalidRequestError(
                f"input {truncate(tensor.name)!r} already exists in request for model {model!r}"
            )
        inputs[tensor.name] = tensor
    check_input_names(inputs, model, signature)
    return inputs


def check_input_names(inputs: Collection[str], model: str, signature: Signature) -> None:
    """Raise InvalidRequestError if a request's inputs are not the model's."""
    expected = [spec.name for spec in signature.inputs]
    allowed = {*expected, *(spec.name for spec in signature.optional)}
    for name in inputs:
        if name not in allowed:
            raise InvalidRequestError(
                f"unexpected inference input {truncate(name)!r} for model {model!r}; it takes {expected}"
            )
    missing = [name for name in expected if name not in inputs]
    if missing:
        raise InvalidRequestError(
            f"expected {len(expected)} inputs but got {len(inputs)} inputs for model {model!r}. "
            f"Got input(s) {list(inputs)}, but missing required input(s) {missing}"
        )


def all_outputs(signature: Signature) -> tuple[RequestedOutput, ...]:
    """Return the outputs of a request that names none."""
    return tuple([RequestedOutput(spec) for spec in signature.outputs])


def _requested_outputs(
    request: pb.ModelInferRequest, model: str, signature: Signature, lease: RegionLease
) -> tuple[RequestedOutput, ...]:
    if not request.outputs:
        return all_outputs(signature)
    by_name = {spec.name: spec for spec in signature.outputs + signature.on_request}
    requested: dict[str, RequestedOutput] = {}
    for output in request.outputs:
        spec = by_name.get(output.name)
        if spec is None:
            raise InvalidRequestError(
                f"unexpected inference output {truncate(output.name)!r} for model {model!r}; it gives {list(by_name)}"
            )
        if output.name in requested:
            raise InvalidRequestError(
                f"output {truncate(output.name)!r} already exists in request for model {model!r}"
            )
        count, span = class_count(output, spec.datatype), lease.span(output) if output.parameters else None
        if count and span is not None:
            raise InvalidRequestError(
                f"output can't set both 'shared_memory_region' and 'classification': output {output.name!r}; leave out one"
            )
        if count and spec.batch_axis:
            raise InvalidRequestError(
                f"output {output.name!r} has its rows on axis {spec.batch_axis}, and classes are given only for rows on axis 0: "
                "ask for its values"
            )
        requested[output.name] = RequestedOutput(spec, count, span)
    return tuple(requested.values())


def write_outputs(response_spec: ResponseSpec, outcome: Outcome) -> None:
    """Write outputs to their places in shared memory. InvalidRequestError, before any is written, if one does not fit."""
    writes = []
    for spec, _, span in response_spec.outputs:
        if span is not None:
            array = outcome.outputs[spec.name]
            if spec.datatype.size:
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            else:
                data = memoryview(_raw_strings(spec, array))
            if len(data) > span.nbytes:
                raise InvalidRequestError(
                    f"shared memory size specified with the request for output {spec.name!r} ({span.nbytes} bytes) should "
                    f"be at least {len(data)} bytes to hold the results"
                )
            writes.append((span, data))
    for span, data in writes:
        span.write(data)


def encode_response(
    model: str,
    version: str,
    response_spec: ResponseSpec,
    outcome: Outcome,
    classifier: Classifier = NO_LABELS,
) -> pb.ModelInferResponse:
    """Return the response, without its id, to a request that the model has answered.

    A request with typed contents gets typed contents if every output's datatype has them.
    """
    outputs: Mapping[str, npt.NDArray[Any]] = outcome.outputs
    response = pb.ModelInferResponse(model_name=model, model_version=version)
    kinds = [BYTES if count else spec.datatype for spec, count, _ in response_spec.outputs]
    typed = response_spec.typed and all(
        kind.contents and output.span is None
        for kind, output in zip(kinds, response_spec.outputs, strict=True)
    )
    for kind, (spec, count, span) in zip(kinds, response_spec.outputs, strict=True):
        array = outputs[spec.name]
        if count:
            array = classifier.classes(spec.name, array, count)
        tensor = response.outputs.add(name=spec.name, datatype=kind.name, shape=array.shape)
        if typed:
            try:
                encode_contents(array, kind, tensor.contents)
            except TensorError as error:
                raise _not_encodable(spec, error) from None
        elif span is not None:
            # An empty entry, because clients find an output's contents by its position among all outputs.
            response.raw_output_contents.append(b"")
        else:
            response.raw_output_contents.append(array.tobytes() if kind.size else _raw_strings(spec, array))
    if response_spec.explain and outcome.batch is not None:
        _explain(response, outcome.batch, outcome)
    return response


def _raw_strings(spec: TensorSpec, array: npt.NDArray[Any]) -> bytes:
    try:
        return encode_raw(array)
    except TensorError as error:
        raise _not_encodable(spec, error) from None


def _not_encodable(spec: TensorSpec, error: TensorError) -> ModelFailedError:
    """Return the error of an output whose elements are no strings, which only a Python function can return."""
    return ModelFailedError(f"the model failed on this request: output {spec.name!r}: {error}")


def _explain(response: pb.ModelInferResponse, batch: BatchInfo, outcome: Outcome) -> None:
    figures: Sequence[tuple[str, int]] = (
        ("batch_number", batch.number),
        ("batch_requests", batch.requests),
        ("batch_rows", batch.rows),
        ("full_batch_rows", batch.full_rows),
        ("position", outcome.position),
        ("priority", outcome.priority),
        ("queue_us", round(outcome.queue_delay * 1e6)),
        ("compute_us", round(batch.compute_time * 1e6)),
        ("predicted_us", round(batch.predicted * 1e6)),
    )
    for name, value in figures:
        response.parameters[name].int64_param = value
    if batch.padded_length is not None:
        response.parameters["padded_length"].int64_param = batch.padded_length
    if batch.reason is not None:
        response.parameters["close_reason"].string_param = batch.reason.value
