"""Serialised requests of a load test: random rows by the model's metadata, or rows of arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages import codec
from tensorferry.client.messages.arguments import quoted
from tensorferry.client.messages.checks import FLOATS, dtype_for
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata, subject_of
from tensorferry.client.messages.results import Parameter
from tensorferry.protos.tensors import Array

# Different random requests that are sent in turn, and the bytes that all of one number of rows may take.
_RANDOM_REQUESTS, _MOST_BYTES = 16, 64 << 20
# Of random BYTES.
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
_WORD = 8


@dataclass
class RequestMaker:
    """Requests for one model with any number of rows.

    `arrays` are inputs from files; the other inputs are random, of `shapes` where the metadata leaves
    axes open. Raises InvalidInput if something does not fit the model. Rows are on
    axis 0 if the metadata leaves that axis open in every input. Not thread-safe.
    """

    model: ModelMetadata
    version: str
    arrays: Mapping[str, Array] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    seed: int = 1

    def __post_init__(self) -> None:
        inputs = self.model.inputs
        self._random = np.random.default_rng(self.seed)
        self._by_rows = bool(inputs) and all(t.shape and t.shape[0] == -1 for t in inputs)
        for name in self.arrays.keys() - {tensor.name for tensor in inputs}:
            expected = "one of " + quoted(tensor.name for tensor in inputs)
            raise InvalidInput("--input", expected, repr(name), "name an input of the model")
        for name in self.shapes.keys() & self.arrays.keys():
            change = "leave out --shape: the file has the shape"
            raise InvalidInput(f"input {name!r}", "--input or --shape", "both", change)

    def requests(self, rows: int) -> tuple[bytes, ...]:
        """Return serialised requests of `rows` rows each, to be sent in turn.

        Without a batch axis, `rows` must be 1 and a request is the whole of each array.
        """
        if not self._by_rows and rows != 1:
            raise InvalidInput(
                "rows", "1", str(rows), f"axis 0 of model {self.model.name!r} is not open: send one row"
            )
        # All rows of the longest file are sent.
        lengths = [len(array) for array in self.arrays.values() if array.ndim] if self._by_rows else []
        number = max([1, *(-(-length // rows) for length in lengths)]) if self.arrays else _RANDOM_REQUESTS
        made: list[bytes] = []
        for at in range(number):
            request = codec.request_of(self.inputs(rows, at), None, None, self.parameters)
            message = codec.encode(self.model.name, self.version, request, self.model)
            made.append(message.SerializeToString())
            if (at + 1) * len(made[0]) >= _MOST_BYTES:
                break
        return tuple(made)

    def inputs(self, rows: int, at: int = 0) -> dict[str, Array]:
        """Return the arrays of one request, number `at`."""
        return {
            tensor.name: self._part(tensor, rows, at)
            for tensor in self.model.inputs
            if not tensor.optional or tensor.name in self.arrays
        }

    def _part(self, tensor: TensorMetadata, rows: int, at: int) -> Array:
        array = self.arrays.get(tensor.name)
        if array is None:
            shape = random_shape(tensor, self.model.name, rows if self._by_rows else None, self.shapes)
            return random_array(tensor, shape, self.model.name, self._random)
        if not self._by_rows or not array.ndim:
            return array
        if not len(array):
            raise InvalidInput(f"input {tensor.name!r}", "at least one row", "none", "give a file with rows")
        # Shorter arrays begin again.
        return np.take(array, range(at * rows, at * rows + rows), axis=0, mode="wrap")


def random_shape(
    tensor: TensorMetadata, model: str, rows: int | None, shapes: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """Return the shape of an input's random array; raise InvalidInput if an axis has no length, or two.

    `rows` is the length of the first axis if the model leaves it open, 1 for None. `shapes` has lengths by input,
    with or without the first axis, which other open axes need.
    """
    subject, first = subject_of(tensor, model), tensor.shape[:1]
    default = 1 if rows is None else rows
    head = tuple(default if size == -1 else size for size in first)
    if tensor.name in shapes:
        shape = tuple(shapes[tensor.name])
        if len(shape) == len(tensor.shape) - 1:
            shape = (*head, *shape)
        expected = (rows, *tensor.shape[1:]) if rows is not None and first == (-1,) else tensor.shape
        if len(shape) != len(expected) or any(
            size not in (-1, chosen) for size, chosen in zip(expected, shape, strict=True)
        ):
            change = "give --shape all axes, with the fixed ones as they are"
            if rows is not None:
                change += f", or all but the first, whose length is {rows} by --rows"
            raise InvalidInput(subject, str(tensor), f"the shape {list(shape)}", change)
        return shape
    if rows is not None and first not in ((), (-1,), (rows,)):
        change = f"leave --rows out, or write --rows {first[0]}"
        raise InvalidInput(subject, str(tensor), f"--rows {rows}", change)
    shape = (*head, *tensor.shape[1:])
    if -1 in shape:
        example = ",".join(str(8 if size == -1 else size) for size in shape)
        change = f"choose its axes, such as --shape {tensor.name}:{example}, or give it with --input"
        raise InvalidInput(subject, str(tensor), "no lengths for its open axes", change)
    return shape


def random_array(
    tensor: TensorMetadata, shape: tuple[int, ...], model: str, generator: np.random.Generator
) -> Array:
    """Return random values: floats from 0 to 1, words of eight letters, all values of UINT8 and INT8.

    Other integers are 0 or 1, because most of them are indices, masks or flags, which every model
    accepts at these values.
    """
    dtype = dtype_for(tensor, subject_of(tensor, model))
    if tensor.datatype == "BYTES":
        count = math.prod(shape)
        letters = generator.choice(_LETTERS, (count, _WORD))
        words = np.empty(count, object)
        words[:] = [letters[index].tobytes() for index in range(count)]
        return words.reshape(shape)
    if tensor.datatype in FLOATS:
        return np.asarray(generator.random(shape)).astype(dtype)
    if dtype.itemsize == 1 and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray(generator.integers(limits.min, limits.max, shape, dtype, endpoint=True))
    return np.asarray(generator.integers(0, 2, shape)).astype(dtype)
