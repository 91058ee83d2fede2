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
from tensorferry.client.messages.codec import Parameter
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata, subject_of
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
    dimensions open. Raises InvalidInput if something does not fit the model. Rows are on
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
        known = {tensor.name for tensor in inputs}
        for option, names in (("--input", self.arrays), ("--shape", self.shapes)):
            for name in names:
                if name not in known:
                    expected = "one of " + quoted(tensor.name for tensor in inputs)
                    raise InvalidInput(option, expected, repr(name), "name an input of the model")
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
        number = max([1, *(length // rows for length in lengths)]) if self.arrays else _RANDOM_REQUESTS
        sent = [each for each in self.model.inputs if not each.optional or each.name in self.arrays]
        made: list[bytes] = []
        for at in range(number):
            inputs = {tensor.name: self._part(tensor, rows, at) for tensor in sent}
            request = codec.request_of(inputs, None, None, self.parameters)
            message = codec.encode(self.model.name, self.version, request, self.model)
            made.append(message.SerializeToString())
            if (at + 1) * len(made[0]) >= _MOST_BYTES:
                break
        return tuple(made)

    def _part(self, tensor: TensorMetadata, rows: int, at: int) -> Array:
        array = self.arrays.get(tensor.name)
        if array is None:
            return random_array(tensor, self._shape_of(tensor, rows), self.model.name, self._random)
        if not self._by_rows or not array.ndim:
            return array
        if not len(array):
            raise InvalidInput(f"input {tensor.name!r}", "at least one row", "none", "give a file with rows")
        # Shorter arrays begin again.
        return np.take(array, range(at * rows, at * rows + rows), axis=0, mode="wrap")

    def _shape_of(self, tensor: TensorMetadata, rows: int) -> tuple[int, ...]:
        """Return the shape of a random tensor: that of --shape, with or without the rows, or the declared one."""
        head = (rows,) if self._by_rows else ()
        declared = (*head, *tensor.shape[len(head) :])
        given = self.shapes.get(tensor.name)
        if given is None and -1 in declared:
            example = ",".join(str(16 if d == -1 else d) for d in declared[len(head) :])
            raise InvalidInput(
                f"input {tensor.name!r}",
                "a shape, because the model leaves dimensions open",
                f"{tensor.datatype} {list(tensor.shape)} without --shape",
                f"add --shape {tensor.name}:{example} (dimensions of your choice)"
                f" or --input {tensor.name}=FILE.npy",
            )
        if given is None:
            return declared
        if len(given) == len(declared) - len(head):
            given = (*head, *given)
        if len(given) != len(declared) or any(d not in (-1, g) for d, g in zip(declared, given, strict=True)):
            what = f"dimensions that fit {list(tensor.shape)}{', without the rows' if head else ''}"
            got = ",".join(map(str, given[1:] if head and len(given) > 1 else given))
            raise InvalidInput(f"--shape {tensor.name}", what, got, "give one number for each dimension")
        return tuple(given)


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
