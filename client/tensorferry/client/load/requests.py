"""Serialised requests of a load test: random rows by the model's metadata, or rows of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages import codec
from tensorferry.client.messages.arguments import quoted
from tensorferry.client.messages.codec import Parameter
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata
from tensorferry.protos.tensors import Array

# Different random requests that are sent in turn, and the bytes that all of one number of rows may take.
_RANDOM_REQUESTS, _MOST_BYTES = 16, 64 << 20

# Returns random values of an input's datatype, of this shape.
Draw = Callable[[TensorMetadata, tuple[int, ...], np.random.Generator], Array]


class RequestMaker:
    """Requests for one model with any number of rows.

    `arrays` are inputs from files; `draw` makes the other inputs, of `shapes` where the metadata
    leaves dimensions open. Raises InvalidInput if something does not fit the model. Rows are on
    axis 0 if the metadata leaves that axis open in every input. Not thread-safe.
    """

    def __init__(
        self,
        model: ModelMetadata,
        version: str = "",
        *,
        draw: Draw,
        arrays: Mapping[str, Array] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        seed: int = 1,
    ) -> None:
        self._model, self._version, self._draw = model, version, draw
        self._arrays = dict(arrays or {})
        self._parameters = parameters
        self._random = np.random.default_rng(seed)
        self._by_rows = bool(model.inputs) and all(t.shape and t.shape[0] == -1 for t in model.inputs)
        self._shapes = dict(shapes or {})
        known = {tensor.name for tensor in model.inputs}
        for option, names in (("--input", self._arrays), ("--shape", self._shapes)):
            for name in names:
                if name not in known:
                    raise InvalidInput(option, _one_of(model), repr(name), "name an input of the model")
        for name in self._shapes.keys() & self._arrays.keys():
            change = "leave out --shape: the file has the shape"
            raise InvalidInput(f"input {name!r}", "--input or --shape", "both", change)

    def requests(self, rows: int) -> tuple[bytes, ...]:
        """Return serialised requests of `rows` rows each, to be sent in turn.

        Without a batch axis, `rows` must be 1 and a request is the whole of each array.
        """
        if not self._by_rows and rows != 1:
            raise InvalidInput(
                "rows", "1", str(rows), f"axis 0 of model {self._model.name!r} is not open: send one row"
            )
        # All rows of the longest file are sent.
        lengths = [len(array) for array in self._arrays.values() if array.ndim] if self._by_rows else []
        number = max([1, *(length // rows for length in lengths)]) if self._arrays else _RANDOM_REQUESTS
        sent = [each for each in self._model.inputs if not each.optional or each.name in self._arrays]
        made: list[bytes] = []
        for at in range(number):
            inputs = {tensor.name: self._part(tensor, rows, at) for tensor in sent}
            request = codec.request_of(inputs, None, None, self._parameters)
            message = codec.encode(self._model.name, self._version, request, self._model)
            made.append(message.SerializeToString())
            if (at + 1) * len(made[0]) >= _MOST_BYTES:
                break
        return tuple(made)

    def _part(self, tensor: TensorMetadata, rows: int, at: int) -> Array:
        array = self._arrays.get(tensor.name)
        if array is None:
            return self._draw(tensor, self._shape_of(tensor, rows), self._random)
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
        given = self._shapes.get(tensor.name)
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


def _one_of(model: ModelMetadata) -> str:
    return "one of " + quoted(tensor.name for tensor in model.inputs)
