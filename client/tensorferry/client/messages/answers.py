"""Comparison of an answer with its request, and with the metadata of its model.

Pure and thread-safe functions. A server may say less than it is asked: an empty id, model name or version of an answer
is not compared. Rows are compared only if the server states that axis 0 counts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from tensorferry.client import errors
from tensorferry.client.errors import InferenceError
from tensorferry.client.messages.arguments import quoted
from tensorferry.client.messages.chunks import MAX_ROWS
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.client.messages.results import Answer
from tensorferry.client.messages.several_answers import takes_several
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors

_CLASSIFICATION = "classification"
# dtypes that only one datatype has, for a comparison without its name. BF16 is stored as UINT16.
_DTYPES = {name: kind.storage for name, kind in tensors.DATATYPES.items() if name != "BF16"}

_MIXED_UP = "do not use it, because the server, or a proxy before it, gives answers to other requests"
_WRONG_METADATA = (
    "correct the model or its metadata on the server; check=False does not compare with the metadata"
)


@dataclass(frozen=True, slots=True)
class DeclaredOutputs:
    """What a model's metadata says of answers.

    `outputs` has the datatype of each output, and whether its axis 0 is variable. `inputs_with_rows` is empty unless
    the server states that rows are independent. Then each variable axis 0 counts rows.
    """

    outputs: Mapping[str, tuple[str, bool]]
    inputs_with_rows: frozenset[str]


def check(request: pb.ModelInferRequest, answer: Answer[Any]) -> None:
    """Raise Internal if the id, the model, its version or the outputs are not those of the request."""
    if answer.id != request.id and answer.id and request.id:
        change = "leave request_id out if the server chooses ids of its own"
        raise _error(request, f"the id {answer.id!r}", f"the request's id {request.id!r}", change)
    if (
        answer.model_name != request.model_name
        and answer.model_name
        # Seldon Core serves each version of a model under a name of its own.
        and answer.model_name != f"{request.model_name}_{answer.model_version}"
    ):
        expected = f"the request's model name {request.model_name!r}"
        raise _error(request, f"the model name {answer.model_name!r}", expected, _MIXED_UP)
    if (
        answer.model_version != request.model_version
        and answer.model_version
        and request.model_version
        # Triton reads "01" as 1.
        and answer.model_version.lstrip("0") != request.model_version.lstrip("0")
    ):
        expected = f"the request's version {request.model_version!r}"
        raise _error(request, f"the version {answer.model_version!r}", expected, _MIXED_UP)
    if request.outputs:
        wanted = {output.name for output in request.outputs}
        if answer.outputs.keys() != wanted:
            expected = f"the requested outputs {quoted(sorted(wanted))}"
            change = "leave outputs out if the server does not choose among them"
            raise _error(request, f"the outputs {quoted(sorted(answer.outputs))}", expected, change)
    elif not answer.outputs and not takes_several(request):
        change = "correct the model on the server, which must answer each request with an output"
        raise _error(request, "no outputs", "at least one", change)


def declared_outputs(metadata: ModelMetadata) -> DeclaredOutputs | None:
    """Return what the metadata says of answers; None if it names no outputs, as KServe's and MLServer's may."""
    if not metadata.outputs:
        return None
    outputs = {tensor.name: (tensor.datatype, tensor.shape[:1] == (-1,)) for tensor in metadata.outputs}
    with_rows = [
        tensor.name for tensor in metadata.inputs if tensor.shape[:1] == (-1,) and not tensor.optional
    ]
    return DeclaredOutputs(outputs, frozenset(with_rows) if MAX_ROWS in metadata.properties else frozenset())


def difference(
    request: pb.ModelInferRequest, answer: Answer[Any], declared: DeclaredOutputs
) -> InferenceError | None:
    """Return the error for an output whose name, datatype or rows are not those of the metadata; None if all fit."""
    classified: Sequence[str] = ()
    if request.outputs:
        classified = [output.name for output in request.outputs if _CLASSIFICATION in output.parameters]
    rows = _rows(request, declared.inputs_with_rows)
    for name, array in answer.outputs.items():
        if name not in declared.outputs:
            expected = f"outputs out of {quoted(sorted(declared.outputs))}, as its metadata says"
            return _error(request, f"the output {name!r}", expected, _WRONG_METADATA)
        datatype, has_rows = declared.outputs[name]
        if name in classified:
            datatype = "BYTES"
        if array.dtype != _DTYPES.get(datatype, np.void) and tensors.datatype_of(array) != datatype:
            received = f"{tensors.datatype_of(array)} for output {name!r}"
            return _error(request, received, f"{datatype}, as its metadata says", _WRONG_METADATA)
        if rows is not None and has_rows and array.shape[:1] != (rows,):
            received = f"shape {list(array.shape)} for output {name!r}"
            expected = f"the {rows} rows of the request on axis 0, as its metadata says"
            return _error(request, received, expected, _WRONG_METADATA)
    return None


def _rows(request: pb.ModelInferRequest, names: frozenset[str]) -> int | None:
    """Return the rows of these inputs; None if the request has none of them, or they differ."""
    rows: int | None = None
    for tensor in request.inputs if names else ():
        if tensor.name in names and tensor.shape:
            size = tensor.shape[0]
            if rows not in (None, size):
                return None
            rows = size
    return rows


def _error(request: pb.ModelInferRequest, received: str, expected: str, change: str) -> InferenceError:
    text = f"the answer of model {request.model_name!r} has {received}, expected {expected}: {change}"
    return errors.Internal(grpc.StatusCode.INTERNAL, text, request.id)
