"""Places of a model's tensors in one region of shared memory, and the messages that refer to them.

Pure functions and immutable records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np

from tensorferry.client import errors
from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages import arguments, checks, codec
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata
from tensorferry.client.messages.results import InferenceResult, Parameter
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

Shapes = Mapping[str, Sequence[int]]

# Each tensor begins at a multiple of this, which suits every datatype and cache line.
_ALIGNMENT = 64
_MAX_ROWS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of a region: where it begins, and its shape for all rows of the region."""

    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    has_rows: bool
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def of_rows(self, rows: int) -> Place:
        """Return the place of the first rows."""
        return replace(self, shape=(rows, *self.shape[1:])) if self.has_rows else self

    def array(self, buffer: Any) -> Array:
        """Return the tensor as an array over the memory of the region."""
        return np.ndarray(self.shape, self.dtype, buffer, self.offset)


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one model in a region for `rows` rows."""

    model: str
    version: str
    rows: int
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        """Size of the region in bytes."""
        last = (*self.inputs, *self.outputs)[-1]
        return last.offset + last.nbytes

    def request(
        self,
        region: str,
        rows: int | None,
        request_id: str | None,
        parameters: Mapping[str, Parameter] | None,
    ) -> pb.ModelInferRequest:
        """Return the request that runs the first rows of the region, all of them for None."""
        rows = self.rows if rows is None else arguments.integer("rows", rows, 1, self.rows)
        request = codec.request_of({}, request_id, None, parameters)
        message = codec.encode(self.model, self.version, request, None)
        for place in (place.of_rows(rows) for place in self.inputs):
            tensor = message.inputs.add(name=place.name, datatype=place.datatype, shape=place.shape)
            _refer(tensor.parameters, region, place)
        for place in self.outputs:
            _refer(message.outputs.add(name=place.name).parameters, region, place)
        return message

    def filled(self, answer: pb.ModelInferResponse) -> list[Place]:
        """Return the places of an answer's outputs, with the shapes that the server wrote."""
        places = {place.name: place for place in self.outputs}
        found: list[Place] = []
        for tensor in answer.outputs:
            place = places.pop(tensor.name, None)
            shape = tuple(tensor.shape)
            if place is None or tensor.datatype != place.datatype or min(shape, default=0) < 0:
                raise _wrong(tensor, answer.id)
            filled = replace(place, shape=shape)
            if filled.nbytes > place.nbytes:
                raise _wrong(tensor, answer.id)
            found.append(filled)
        return found


def layout(model: ModelMetadata, version: str, rows: int, shapes: Shapes | None) -> Layout:
    """Return the places of all tensors; raise InvalidInput for one whose size is not known.

    `shapes` has the whole shapes of tensors with dynamic axes other than the rows.
    """
    arguments.integer("rows", rows, 1, _MAX_ROWS)
    given = {} if shapes is None else arguments.mapping("shapes", shapes, "write {'ids': (32, 128)}")
    wanted = [tensor for tensor in model.inputs if not tensor.optional]
    if not wanted or not model.outputs:
        expected = "a model whose metadata names its inputs and outputs"
        received = f"model {model.name!r}, of which the server names none"
        raise InvalidInput("shared_memory()", expected, received, "use infer with arrays")
    known = {tensor.name for tensor in (*wanted, *model.outputs)}
    if unknown := [name for name in given if name not in known]:
        expected = f"inputs and outputs of model {model.name!r}: {arguments.quoted(sorted(known))}"
        raise InvalidInput("shapes", expected, repr(unknown[0]), f"remove {unknown[0]!r}")
    end = 0
    places: list[Place] = []
    for tensor in (*wanted, *model.outputs):
        place = Place(
            tensor.name,
            tensor.datatype,
            _dtype(tensor, model.name),
            _shape(tensor, model.name, rows, given.get(tensor.name)),
            tensor.shape[:1] == (-1,),
            -(-end // _ALIGNMENT) * _ALIGNMENT,
        )
        places.append(place)
        end = place.offset + place.nbytes
    return Layout(model.name, version, rows, tuple(places[: len(wanted)]), tuple(places[len(wanted) :]))


def without_outputs(answer: pb.ModelInferResponse) -> InferenceResult:
    """Return the result of an answer, but none of its outputs, which are in shared memory."""
    del answer.outputs[:], answer.raw_output_contents[:]
    return codec.decode(answer)


def _dtype(tensor: TensorMetadata, model: str) -> np.dtype[Any]:
    expected, change = "a datatype of a fixed size", "use infer with arrays"
    try:
        # BF16 raises here, before there is memory, without the package ml_dtypes.
        dtype = checks.dtype_of(tensor.datatype)
    except tensors.TensorError as error:
        raise InvalidInput(_subject(tensor, model), expected, tensor.datatype, str(error)) from None
    if dtype.hasobject:
        raise InvalidInput(_subject(tensor, model), expected, tensor.datatype, change)
    return dtype


def _subject(tensor: TensorMetadata, model: str) -> str:
    return f"tensor {tensor.name!r} of model {model!r} in shared memory"


def _shape(tensor: TensorMetadata, model: str, rows: int, given: Sequence[int] | None) -> tuple[int, ...]:
    subject = _subject(tensor, model)
    expected = (rows, *tensor.shape[1:]) if tensor.shape[:1] == (-1,) else tensor.shape
    if given is None:
        if -1 in expected:
            example = tuple(128 if axis < 0 else axis for axis in expected)
            change = f"give its whole shape, as in shapes={{{tensor.name!r}: {example}}}"
            raise InvalidInput(subject, "a fixed shape", str(list(expected)), change)
        return expected
    shape = tuple(
        arguments.integer(f"each axis of {tensor.name!r} in shapes", axis, 1, _MAX_ROWS) for axis in given
    )
    fits = len(shape) == len(expected) and all(
        e in (-1, axis) for e, axis in zip(expected, shape, strict=True)
    )
    if not fits:
        raise InvalidInput(subject, f"a shape like {list(expected)}", str(list(shape)), "give another one")
    return shape


def _wrong(tensor: Any, request_id: str) -> errors.InferenceError:
    text = (
        f"output {tensor.name!r} of the answer, {tensor.datatype} {list(tensor.shape)}, is not what was"
        " requested in shared memory"
    )
    return errors.of_code(grpc.StatusCode.INTERNAL, text, request_id)


def _refer(parameters: Any, region: str, place: Place) -> None:
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_byte_size"].int64_param = place.nbytes
    parameters["shared_memory_offset"].int64_param = place.offset
