"""Protobuf request ↔ tensors. Every check of what came over the wire is here.

Messages keep the wording by which clients of other servers of this protocol recognise them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.batcher import BatchInfo, Outcome, Tensor
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import (
    TensorError,
    datatype,
    decode_contents,
    decode_raw,
    element_count,
    encode_contents,
    encode_raw,
)
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import InvalidRequestError, truncate
from tensorferry.server.inference.classification import BYTES, PLAIN, Classifier, class_count
from tensorferry.server.inference.request_limits import DEFAULT, check_claims, check_lengths
from tensorferry.server.shared_memory.regions import RegionLease, Span
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.server.wire.parameters import read_parameters

_Wire = pb.ModelInferRequest.InferInputTensor


class ResponseSpec(NamedTuple):
    """What a response has to look like: the outputs asked for, whether they travel in typed contents,
    whether the batch is described, and how many classes are wanted of each output, 0 for its values
    (empty: of none). `places` says of each output where in shared memory it goes, None for in the
    response (empty: all do).
    """

    outputs: tuple[TensorSpec, ...]
    typed: bool
    explain: bool
    classes: tuple[int, ...] = ()
    places: tuple[Span | None, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A request's tensors in the order of `signature`, and what goes with them.

    That is the model's, with the optional inputs that the request gives.
    `rows` is the size of axis 0 (1 for a model that is not batched), `key` what requests of
    one batch have in common, `shared` the places of the tensors without rows, `timeout` the seconds that the request itself allows (inf: it does
    not say), `priority` the class that it names (0: none).
    """

    signature: Signature
    tensors: tuple[Tensor, ...]
    rows: int
    key: Hashable
    shared: frozenset[int]
    nbytes: int
    timeout: float
    priority: int
    wanted: ResponseSpec


def decode_request(
    request: pb.ModelInferRequest,
    model: str,
    signature: Signature,
    batched: bool,
    lease: RegionLease,
    limits: RequestLimits = DEFAULT,
) -> DecodedRequest:
    """Holds a request against the model's signature and takes its tensors out.

    A ServerError says what was received and what was expected. Numeric raw contents are not copied:
    the tensors refer to the request's own bytes. What is in shared memory is copied, and its regions are
    the lease's, which is the caller's to release.
    """
    check_claims(request, limits)
    parameters = read_parameters(request)
    given = _inputs_by_name(request, model, signature)
    signature = signature.with_given_inputs(given)
    outputs = _requested_outputs(request, model, signature)
    classes, places = _destinations(request, outputs, lease)
    spans = _spans(request, lease)
    raws = _raw_contents(request, model, spans)
    tensors: list[Tensor] = []
    for spec in signature.inputs:
        wire = given[spec.name]
        _check_tensor(wire, spec, model, batched)
        if spec.optional and 0 in wire.shape and 0 not in spec.dims:
            raise InvalidRequestError(
                f"optional input {spec.name!r} of model {model!r} has shape {list(wire.shape)}: give it at least one "
                "element along each axis, or leave it out"
            )
        try:
            tensors.append(_tensor(wire, spec, model, raws, spans.get(spec.name), limits))
        except TensorError as error:
            raise InvalidRequestError(f"input {spec.name!r} of model {model!r}: {error}") from None
    rows, shared = 1, signature.shared_inputs(batched=batched)
    if batched:
        first, rows = next(
            (spec.name, tensor.shape[0])
            for spec, tensor in zip(signature.inputs, tensors, strict=True)
            if spec.has_row_axis
        )
        if limits.rows and rows > limits.rows:
            raise InvalidRequestError(
                f"the request has {rows} rows; this server takes at most {limits.rows}: send fewer at once, or start it with a "
                "larger --max-request-rows"
            )
        for tensor, spec in zip(tensors, signature.inputs, strict=True):
            if spec.has_row_axis and tensor.shape[0] != rows:
                raise InvalidRequestError(
                    f"input {spec.name!r} batch size does not match other inputs for model {model!r}: "
                    f"{tensor.shape[0]} rows, {first!r} has {rows}"
                )
    return DecodedRequest(
        signature,
        tensors=tuple(tensors),
        rows=rows,
        key=tuple(tensor.shape[1:] for tensor in tensors),
        shared=shared,
        nbytes=request.ByteSize() + sum([span.nbytes for span in spans.values()]),
        timeout=parameters.timeout,
        priority=parameters.priority,
        wanted=ResponseSpec(
            outputs,
            # Where no input shows a form (there are none, or all are in shared memory) clients expect raw.
            typed=raws is None and len(spans) < len(given),
            explain=parameters.explain,
            classes=classes,
            places=places,
        ),
    )


def _inputs_by_name(request: pb.ModelInferRequest, model: str, signature: Signature) -> Mapping[str, _Wire]:
    given: dict[str, _Wire] = {}
    for tensor in request.inputs:
        if tensor.name in given:
            raise InvalidRequestError(
                f"input {truncate(tensor.name)!r} already exists in request for model {model!r}"
            )
        given[tensor.name] = tensor
    expected = [spec.name for spec in signature.inputs]
    allowed = {*expected, *(spec.name for spec in signature.optional)}
    for name in given:
        if name not in allowed:
            raise InvalidRequestError(
                f"unexpected inference input {truncate(name)!r} for model {model!r}; it takes {expected}"
            )
    missing = [name for name in expected if name not in given]
    if missing:
        raise InvalidRequestError(
            f"expected {len(expected)} inputs but got {len(given)} inputs for model {model!r}. "
            f"Got input(s) {list(given)}, but missing required input(s) {missing}"
        )
    return given


def _spans(request: pb.ModelInferRequest, lease: RegionLease) -> Mapping[str, Span]:
    """Where inputs are in shared memory, by name."""
    spans = {}
    for tensor in request.inputs:
        if tensor.parameters and (span := lease.span(tensor)) is not None:
            spans[tensor.name] = span
    total = sum([span.nbytes for span in spans.values()])
    if total > lease.regions.max_bytes:
        raise InvalidRequestError(
            f"the request has {total} bytes in shared memory, which is more than the queue ever holds, "
            f"{lease.regions.max_bytes}: send less at once, or raise --max-queue-bytes"
        )
    return spans


def _raw_contents(
    request: pb.ModelInferRequest, model: str, spans: Mapping[str, Span]
) -> Mapping[str, bytes] | None:
    """Raw contents by input, of those that are not in shared memory; None when the request has none."""
    raws = request.raw_input_contents
    sent = [tensor for tensor in request.inputs if tensor.name not in spans] if spans else request.inputs
    for tensor in request.inputs if raws or spans else ():
        if not tensor.HasField("contents"):
            continue
        if tensor.name in spans:
            raise InvalidRequestError(
                f"unexpected 'content' provided when using shared memory for input tensor {tensor.name!r} for model "
                f"{model!r}: leave it out, or send the tensor"
            )
        if raws:
            raise InvalidRequestError(
                f"contents field must not be specified when using raw_input_contents for input {tensor.name!r} "
                f"for model {model!r}"
            )
    if not raws:
        return None
    if len(raws) != len(sent):
        lacking = (
            f"unable to find data for input tensor {sent[len(raws)].name!r} for model {model!r} in request: "
            if len(raws) < len(sent)
            else ""
        )
        raise InvalidRequestError(
            f"{lacking}raw_input_contents has {len(raws)} entries for the {len(sent)} inputs of model {model!r}"
            f"{' that are not in shared memory' if spans else ''}; it must have one for each, in their order"
        )
    return {tensor.name: raw for tensor, raw in zip(sent, raws, strict=True)}


def _check_tensor(tensor: _Wire, spec: TensorSpec, model: str, batched: bool) -> None:
    if tensor.datatype != spec.datatype.name:
        datatype(tensor.datatype)
        raise InvalidRequestError(
            f"inference input {spec.name!r} data-type is {tensor.datatype!r}, but model {model!r} expects "
            f"{spec.datatype.name!r}"
        )
    shape = tensor.shape
    if batched and spec.has_row_axis and not shape:
        raise InvalidRequestError(
            f"input {spec.name!r} has no shape but model {model!r} requires a batch dimension"
        )
    if (len(shape) != len(spec.dims) and not spec.any_rank) or any(
        size != dim if isinstance(dim, int) else size < 0 for _, dim, size in spec.axes(tuple(shape))
    ):
        raise InvalidRequestError(
            f"unexpected shape for input {spec.name!r} for model {model!r}. Expected {list(spec.shape)}, "
            f"got {list(shape)}" + (" (axis 0 counts rows)" if batched and spec.has_row_axis else "")
        )


def _tensor(
    tensor: _Wire,
    spec: TensorSpec,
    model: str,
    raws: Mapping[str, bytes] | None,
    span: Span | None,
    limits: RequestLimits,
) -> Tensor:
    kind, shape = spec.datatype, tuple(tensor.shape)
    if span is None and raws is None:
        if not tensor.HasField("contents") and element_count(shape):
            raise InvalidRequestError(
                f"unable to find data for input tensor {spec.name!r} for model {model!r} in request: it has neither "
                "contents nor an entry in raw_input_contents"
            )
        array = decode_contents(tensor.contents, kind, shape)
    else:
        raw = raws[spec.name] if span is None and raws is not None else b""
        nbytes = len(raw) if span is None else span.nbytes
        expected = element_count(shape) * kind.size
        if kind.size and nbytes != expected:
            raise InvalidRequestError(
                f"input byte size mismatch for input {spec.name!r} for model {model!r}. Expected {expected}, got {nbytes} "
                f"({kind.name} of shape {list(shape)})"
            )
        if span is not None:
            raw = span.read()
        if kind.size:
            return Tensor(kind.storage, shape, raw)
        array = decode_raw(raw, kind, shape)
    if kind.name == "BYTES":
        check_lengths(array, spec.name, limits)
        return Tensor(kind.storage, shape, _as_text(array))
    return Tensor(kind.storage, shape, array.tobytes())


def _as_text(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    texts = np.empty(array.size, dtype=object)
    try:
        texts[:] = [element.decode() for element in array.flat]
    except UnicodeDecodeError as error:
        raise TensorError(f"an element is not UTF-8, and ONNX strings are ({error})") from None
    return texts.reshape(array.shape)


def _requested_outputs(
    request: pb.ModelInferRequest, model: str, signature: Signature
) -> tuple[TensorSpec, ...]:
    if not request.outputs:
        return signature.outputs
    by_name = {spec.name: spec for spec in signature.outputs}
    wanted: dict[str, TensorSpec] = {}
    for output in request.outputs:
        if output.name not in by_name:
            raise InvalidRequestError(
                f"unexpected inference output {truncate(output.name)!r} for model {model!r}; it gives {list(by_name)}"
            )
        if output.name in wanted:
            raise InvalidRequestError(
                f"output {truncate(output.name)!r} already exists in request for model {model!r}"
            )
        wanted[output.name] = by_name[output.name]
    return tuple(wanted.values())


def _destinations(
    request: pb.ModelInferRequest, outputs: tuple[TensorSpec, ...], lease: RegionLease
) -> tuple[tuple[int, ...], tuple[Span | None, ...]]:
    """Which requested outputs are to be classes, and which go to shared memory; () for none."""
    # Where none is named, all are wanted as they are.
    classes: list[int] = []
    places: list[Span | None] = []
    for output, spec in zip(request.outputs, outputs, strict=False):
        count, span = class_count(output, spec.datatype), lease.span(output) if output.parameters else None
        if count and span is not None:
            raise InvalidRequestError(
                f"output can't set both 'shared_memory_region' and 'classification': output {output.name!r}; leave out one"
            )
        classes.append(count)
        places.append(span)
    return tuple(classes) if any(classes) else (), tuple(places) if any(places) else ()


def write_outputs(wanted: ResponseSpec, outcome: Outcome) -> None:
    """Puts outputs where in shared memory they are wanted. InvalidRequestError when one does not fit there."""
    placed = []
    for spec, span in zip(wanted.outputs, wanted.places, strict=False):
        if span is not None:
            array = outcome.outputs[spec.name]
            if spec.datatype.size:
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            else:
                data = memoryview(encode_raw(array))
            if len(data) > span.nbytes:
                raise InvalidRequestError(
                    f"shared memory size specified with the request for output {spec.name!r} ({span.nbytes} bytes) should "
                    f"be at least {len(data)} bytes to hold the results"
                )
            placed.append((span, data))
    for span, data in placed:
        span.write(data)


def encode_response(
    model: str, version: str, wanted: ResponseSpec, outcome: Outcome, classifier: Classifier = PLAIN
) -> pb.ModelInferResponse:
    """The response, without its id, to a request whose outcome is an answer.

    Typed contents are answered with typed contents where every output's datatype has them,
    else with raw ones.
    """
    outputs: Mapping[str, npt.NDArray[Any]] = outcome.outputs
    response = pb.ModelInferResponse(model_name=model, model_version=version)
    classes = wanted.classes or (0,) * len(wanted.outputs)
    kinds = [BYTES if count else spec.datatype for spec, count in zip(wanted.outputs, classes, strict=True)]
    typed = wanted.typed and not wanted.places and all(kind.contents for kind in kinds)
    places = wanted.places or (None,) * len(wanted.outputs)
    for spec, kind, count, span in zip(wanted.outputs, kinds, classes, places, strict=True):
        array = outputs[spec.name]
        if count:
            array = classifier.classes(spec.name, array, count)
        tensor = response.outputs.add(name=spec.name, datatype=kind.name, shape=array.shape)
        if typed:
            encode_contents(array, kind, tensor.contents)
        elif span is not None:
            # Clients find an output's contents by its place among all outputs.
            response.raw_output_contents.append(b"")
        else:
            response.raw_output_contents.append(encode_raw(array) if kind.size == 0 else array.tobytes())
    if wanted.explain and outcome.batch is not None:
        _explain(response, outcome.batch, outcome)
    return response


def _explain(response: pb.ModelInferResponse, batch: BatchInfo, outcome: Outcome) -> None:
    figures: Sequence[tuple[str, int]] = (
        ("batch_number", batch.number),
        ("batch_requests", batch.requests),
        ("batch_rows", batch.rows),
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
