"""Protobuf request ↔ tensors. Every check of what came over the wire is here.

Messages keep the wording by which clients of other servers of this protocol recognise them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from tensorferry.batcher import BatchInfo, Outcome, Tensor
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import (
    Datatype,
    TensorError,
    check_raw,
    datatype,
    decode_contents,
    decode_raw,
    encode_contents,
    encode_raw,
)
from tensorferry.server.errors import InvalidRequestError, UnsupportedError
from tensorferry.server.signature import Signature, TensorSpec

# A request with this parameter true learns what batch it rode in, from the response's parameters.
EXPLAIN = "explain"
# Microseconds from the request's arrival to its deadline, as Triton's clients send it.
TIMEOUT = "timeout"
# The request's class, 1 the highest, as Triton's clients send it.
PRIORITY = "priority"

_Message = TypeVar("_Message", bound=Message)
_Wire = pb.ModelInferRequest.InferInputTensor


class Wanted(NamedTuple):
    """What a response has to look like: the outputs asked for, whether they travel in typed contents,
    and whether the batch is described.
    """

    outputs: tuple[TensorSpec, ...]
    typed: bool
    explain: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request's tensors in the model's order, and what goes with them.

    `rows` is the size of axis 0 (1 for a model that is not batched), `key` what requests of
    one batch have in common, `timeout` the seconds that the request itself allows (inf: it does
    not say), `priority` the class that it names (0: none).
    """

    tensors: tuple[Tensor, ...]
    rows: int
    key: Hashable
    nbytes: int
    timeout: float
    priority: int
    wanted: Wanted


def parse(data: bytes, kind: type[_Message]) -> _Message:
    """The message of this kind in these bytes; InvalidRequestError when they are none."""
    try:
        return kind.FromString(data)
    except Exception:
        raise InvalidRequestError(
            f"the message of {len(data)} bytes is not a {kind.DESCRIPTOR.name}"
        ) from None


def decode(request: pb.ModelInferRequest, model: str, signature: Signature, batched: bool) -> Decoded:
    """Holds a request against the model's signature and takes its tensors out.

    InvalidRequestError or UnsupportedError says what was received and what was expected.
    Numeric raw contents are not copied: the tensors refer to the request's own bytes.
    """
    given = _inputs_by_name(request, model, signature)
    raws = _raw_contents(request, model)
    tensors: list[Tensor] = []
    for spec in signature.inputs:
        wire = given[spec.name]
        _check_tensor(wire, spec, model, batched)
        try:
            tensors.append(_tensor(wire, raws.get(spec.name) if raws is not None else None, spec.datatype))
        except TensorError as error:
            raise InvalidRequestError(f"input {spec.name!r} of model {model!r}: {error}") from None
    rows = 1
    if batched:
        rows = tensors[0].shape[0]
        for tensor, spec in zip(tensors, signature.inputs, strict=True):
            if tensor.shape[0] != rows:
                raise InvalidRequestError(
                    f"input {spec.name!r} batch size does not match other inputs for model {model!r}: "
                    f"{tensor.shape[0]} rows, {signature.inputs[0].name!r} has {rows}"
                )
    return Decoded(
        tensors=tuple(tensors),
        rows=rows,
        key=tuple(tensor.shape[1:] for tensor in tensors),
        nbytes=request.ByteSize(),
        timeout=(_natural(request, TIMEOUT, "of microseconds") or math.inf) / 1e6,
        priority=_natural(request, PRIORITY, "from 1, the highest class"),
        wanted=Wanted(
            _requested_outputs(request, model, signature),
            # A request without inputs shows neither form; clients of other servers expect raw.
            typed=raws is None and bool(request.inputs),
            explain=EXPLAIN in request.parameters and request.parameters[EXPLAIN].bool_param,
        ),
    )


def _inputs_by_name(request: pb.ModelInferRequest, model: str, signature: Signature) -> Mapping[str, _Wire]:
    given: dict[str, _Wire] = {}
    for tensor in request.inputs:
        if tensor.name in given:
            raise InvalidRequestError(
                f"input {tensor.name!r} already exists in the request for model {model!r}"
            )
        # Before raw contents are counted: a tensor in shared memory has none.
        if tensor.parameters and "shared_memory_region" in tensor.parameters:
            raise UnsupportedError(
                f"input {tensor.name!r}: this server does not take tensors in shared memory; send them"
            )
        given[tensor.name] = tensor
    expected = [spec.name for spec in signature.inputs]
    for name in given:
        if name not in expected:
            raise InvalidRequestError(
                f"unexpected inference input {name!r} for model {model!r}; it takes {expected}"
            )
    missing = [name for name in expected if name not in given]
    if missing:
        raise InvalidRequestError(
            f"expected {len(expected)} inputs but got {len(given)} inputs for model {model!r}. "
            f"Got input(s) {list(given)}, but missing required input(s) {missing}"
        )
    return given


def _raw_contents(request: pb.ModelInferRequest, model: str) -> Mapping[str, bytes] | None:
    """Raw contents by input; None when the request has typed contents."""
    raws = request.raw_input_contents
    if not raws:
        return None
    for tensor in request.inputs:
        if tensor.HasField("contents"):
            raise InvalidRequestError(
                f"contents field must not be specified when using raw_input_contents for input {tensor.name!r} "
                f"for model {model!r}"
            )
    if len(raws) != len(request.inputs):
        raise InvalidRequestError(
            f"raw_input_contents has {len(raws)} entries for the {len(request.inputs)} inputs of model {model!r}; "
            "it must have one for each, in their order"
        )
    return {tensor.name: raw for tensor, raw in zip(request.inputs, raws, strict=True)}


def _check_tensor(tensor: _Wire, spec: TensorSpec, model: str, batched: bool) -> None:
    if tensor.datatype != spec.datatype.name:
        datatype(tensor.datatype)
        raise InvalidRequestError(
            f"inference input {spec.name!r} data-type is {tensor.datatype!r}, but model {model!r} expects "
            f"{spec.datatype.name!r}"
        )
    shape = tensor.shape
    if batched and not shape:
        raise InvalidRequestError(
            f"input {spec.name!r} has no shape but model {model!r} requires a batch dimension"
        )
    if len(shape) != len(spec.dims) or any(
        size != dim if isinstance(dim, int) else size < 0 for size, dim in zip(shape, spec.dims, strict=True)
    ):
        raise InvalidRequestError(
            f"unexpected shape for input {spec.name!r} for model {model!r}. Expected {list(spec.shape)}, "
            f"got {list(shape)}" + (" (axis 0 counts rows)" if batched else "")
        )


def _tensor(tensor: _Wire, raw: bytes | None, kind: Datatype) -> Tensor:
    shape = tuple(tensor.shape)
    if raw is not None and kind.size:
        check_raw(raw, kind, shape)
        return Tensor(kind.storage, shape, raw)
    array = decode_contents(tensor.contents, kind, shape) if raw is None else decode_raw(raw, kind, shape)
    if kind.name == "BYTES":
        return Tensor(kind.storage, shape, _as_text(array))
    return Tensor(kind.storage, shape, array.tobytes())


def _as_text(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    texts = np.empty(array.size, dtype=object)
    try:
        texts[:] = [element.decode() for element in array.flat]
    except UnicodeDecodeError as error:
        raise TensorError(f"an element is not UTF-8, and ONNX strings are ({error})") from None
    return texts.reshape(array.shape)


def _natural(request: pb.ModelInferRequest, name: str, what: str) -> int:
    """A parameter that is an integer of at least 0; 0 when the request has none."""
    if name not in request.parameters:
        return 0
    parameter = request.parameters[name]
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in ("int64_param", "uint64_param") or getattr(parameter, kind) < 0:
        raise InvalidRequestError(
            f"parameter {name!r} must be an int64_param {what}, of at least 0 (0: none), got {kind} "
            f"{getattr(parameter, kind or '', None)!r}"
        )
    value: int = getattr(parameter, kind)
    return value


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
                f"unexpected inference output {output.name!r} for model {model!r}; it gives {list(by_name)}"
            )
        if output.name in wanted:
            raise InvalidRequestError(
                f"output {output.name!r} already exists in the request for model {model!r}"
            )
        for parameter in ("classification", "shared_memory_region"):
            if parameter in output.parameters:
                raise UnsupportedError(
                    f"output {output.name!r}: this server does not support {parameter!r} of outputs"
                )
        wanted[output.name] = by_name[output.name]
    return tuple(wanted.values())


def encode(model: str, version: str, wanted: Wanted, outcome: Outcome) -> pb.ModelInferResponse:
    """The response, without its id, to a request whose outcome is an answer.

    Typed contents are answered with typed contents where every output's datatype has them,
    else with raw ones.
    """
    outputs: Mapping[str, npt.NDArray[Any]] = outcome.outputs
    response = pb.ModelInferResponse(model_name=model, model_version=version)
    typed = wanted.typed and all(spec.datatype.contents for spec in wanted.outputs)
    for spec in wanted.outputs:
        array = outputs[spec.name]
        tensor = response.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=array.shape)
        if typed:
            encode_contents(array, spec.datatype, tensor.contents)
        else:
            response.raw_output_contents.append(
                encode_raw(array) if spec.datatype.size == 0 else array.tobytes()
            )
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
