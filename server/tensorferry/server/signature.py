"""Signature of an ONNX model: names, datatypes and shapes of inputs and outputs, and their batch axis."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tensorferry.protos.tensors import DATATYPES, Datatype
from tensorferry.server.errors import StartError

_T = TypeVar("_T")

# Of datatypes that ONNX Runtime does not call by the protocol's name in small letters.
_ONNX_NAMES = {"FP16": "float16", "FP32": "float", "FP64": "double", "BF16": "bfloat16", "BYTES": "string"}
_DATATYPE_OF_ONNX_TYPE = {f"tensor({_ONNX_NAMES.get(name, name.lower())})": name for name in DATATYPES}

# The largest input that the requests of a batch can share. The limit exists because the values of each request are
# compared with those of the others. A string counts as one byte.
_MAX_SHARED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output. A dimension in `dims` is a size, or the name of a variable dimension ('' if it has no name).

    `counts_rows` marks an output whose first dimension varied with the rows in a test run, although the file fixes it
    to 1. `any_rank` means that the file has no shape; `dims` then has one variable dimension, for axis 0. An `optional`
    input has a default value in the file. The elements of a BYTES tensor are `str`, or `bytes` if it is `binary`.
    `most_bytes` bounds a client's request with this input; 0 is no bound. `batch_axis` is the axis of the rows in
    tensors of clients; `dims` and the server's tensors have it first.
    """

    name: str
    datatype: Datatype
    dims: tuple[int | str, ...]
    counts_rows: bool = False
    any_rank: bool = False
    optional: bool = False
    binary: bool = False
    most_bytes: int = 0
    batch_axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of clients' tensors in the protocol's form, with -1 for a variable dimension."""
        return tuple(dim if isinstance(dim, int) else -1 for dim in self.rows_placed(self.dims))

    def rows_first(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the server's shape of a client's tensor, which must have the axis of the rows."""
        axis = self.batch_axis
        return (shape[axis], *shape[:axis], *shape[axis + 1 :]) if axis else shape

    def rows_placed(self, dims: tuple[_T, ...]) -> tuple[_T, ...]:
        """Return what belongs to the axes of the server's tensor, in the order of clients' axes."""
        axis = self.batch_axis
        return (*dims[1 : axis + 1], dims[0], *dims[axis + 1 :]) if axis else dims

    @property
    def has_row_axis(self) -> bool:
        """Whether axis 0 is variable, and thus counts the rows of a batched model; never true of an optional input."""
        return bool(self.dims) and not isinstance(self.dims[0], int) and not self.optional

    @property
    def is_float(self) -> bool:
        """Whether the tensor has floats, including BF16, which is stored as integers."""
        return self.datatype.storage.kind == "f" or self.datatype.name == "BF16"

    def element(self, text: str) -> str | bytes:
        """Return a text as an element of this BYTES tensor; as UTF-8 if the tensor is `binary`."""
        return text.encode() if self.binary else text

    def elements(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array of objects with all elements as this BYTES tensor has them; the array itself if they are so.

        TypeError if an element is neither str nor bytes. UnicodeError if one is not UTF-8.
        """
        kind = bytes if self.binary else str
        if {*map(type, array.flat)} <= {kind}:
            return array
        converted = np.empty(array.size, object)
        converted[:] = [_converted(element, kind) for element in array.flat]
        return converted.reshape(array.shape)

    def clients_axis(self, axis: int) -> int:
        """Return the number that an axis of the server's tensor has in clients' tensors."""
        return self.rows_placed(tuple(range(len(self.dims)))).index(axis) if self.batch_axis else axis

    def axes(self, shape: tuple[int, ...]) -> Iterator[tuple[int, int | str, int]]:
        """Yield each axis of a tensor with this shape, which must fit: its number, its dimension in `dims`, and its length."""
        dims = ("",) * len(shape) if self.any_rank else self.dims
        for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            yield axis, dim, size

    def lengths(self, named: Mapping[str, int | None]) -> list[int | None]:
        """Return the length of each dimension, given those of names; None if it is unknown."""
        return [dim if isinstance(dim, int) else named.get(dim) for dim in self.dims]

    def __str__(self) -> str:
        return f"{self.name}: {self.datatype.name}{'[...]' if self.any_rank else list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model, in the model's order.

    A request can omit `optional` inputs. It gets the outputs `on_request` only if it names them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    optional: tuple[TensorSpec, ...] = ()
    on_request: tuple[TensorSpec, ...] = ()

    def with_given_inputs(self, names: Collection[str]) -> Signature:
        """Return the signature of a request with these inputs: the optional ones among them become required inputs."""
        extra = tuple(spec for spec in self.optional if spec.name in names)
        return replace(self, inputs=self.inputs + extra, optional=()) if extra else self

    def no_batch_axis_reason(self) -> str | None:
        """Return why the model has no batch axis; None if axis 0 of an input and of every output is variable.

        Other inputs may be small and of a fixed shape: requests share a batch if their values are equal.
        """
        no_input_has_rows = not any(spec.has_row_axis for spec in self.inputs)
        for spec in self.inputs:
            if spec.any_rank:
                return f"the file does not say how many dimensions input {spec.name!r} has"
            if spec.has_row_axis or not (no_input_has_rows or _too_large_to_share(spec)):
                continue
            return _no_rows("input", spec)
        for spec in self.outputs:
            if not spec.has_row_axis:
                return _no_rows("output", spec)
        return None if self.inputs else "the model has no inputs"

    def with_batch_axes(self, axes: Mapping[str, int]) -> Signature:
        """Return the signature with these batch axes of clients' tensors, by name."""

        def placed(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(replace(spec, batch_axis=axes.get(spec.name, 0)) for spec in specs)

        return replace(self, inputs=placed(self.inputs), outputs=placed(self.outputs))

    @property
    def batch_axes(self) -> Mapping[str, int]:
        """The batch axes of clients' tensors that are not the first, by name."""
        return {spec.name: spec.batch_axis for spec in self.inputs + self.outputs if spec.batch_axis}

    def named_lengths(self, shapes: Iterable[tuple[int, ...]]) -> dict[str, int | None]:
        """Return the lengths of named dimensions of inputs with these shapes; None for a name with two lengths."""
        named: dict[str, int | None] = {}
        for spec, shape in zip(self.inputs, shapes, strict=True):
            for _, dim, size in spec.axes(shape):
                if isinstance(dim, str) and dim:
                    named[dim] = size if named.get(dim, size) == size else None
        return named

    def shared_inputs(self, *, batched: bool) -> frozenset[int]:
        """Return the positions of the inputs without rows; requests with equal values there can share a batch."""
        if not batched:
            return frozenset()
        return frozenset(index for index, spec in enumerate(self.inputs) if not spec.has_row_axis)

    def __str__(self) -> str:
        inputs = [str(spec) for spec in self.inputs]
        if self.optional:
            # Only their number, because some exporters list all weights as optional inputs.
            inputs.append(f"{len(self.optional)} optional")
        return f"({', '.join(inputs)}) -> ({', '.join(map(str, self.outputs))})"


def _converted(element: object, kind: type[str] | type[bytes]) -> str | bytes:
    if isinstance(element, str):
        return str(element) if kind is str else element.encode()
    if isinstance(element, bytes):
        return element.decode() if kind is str else bytes(element)
    raise TypeError(f"an element of type {type(element).__name__}; elements are str or bytes")


def _too_large_to_share(spec: TensorSpec) -> bool:
    if not all(isinstance(dim, int) for dim in spec.dims):
        return True
    elements = math.prod(dim for dim in spec.dims if isinstance(dim, int))
    return elements * (spec.datatype.size or 1) > _MAX_SHARED_BYTES


def _no_rows(kind: str, spec: TensorSpec) -> str:
    if not spec.dims:
        return f"{kind} {spec.name!r} is a scalar"
    return f"the first dimension of {kind} {spec.name!r} is fixed to {spec.dims[0]}"


def signature_of(
    inputs: Iterable[Any],
    outputs: Iterable[Any],
    shapeless: Container[str] = (),
    optional: Iterable[Any] = (),
) -> Signature:
    """Return the signature that ONNX Runtime's node descriptions (`name`, `type`, `shape`) give.

    ONNX Runtime describes a node without a shape as a scalar, so `shapeless` has the names of such nodes. StartError
    names an input or output whose type has no datatype in the protocol.
    """
    return Signature(
        tuple(_spec_of(node, "input", shapeless) for node in inputs),
        tuple(_spec_of(node, "output", shapeless) for node in outputs),
        tuple(
            replace(_spec_of(node, "input", shapeless), optional=True)
            for node in optional
            # A request can never have a value for an input of a type that the protocol does not have.
            if node.type in _DATATYPE_OF_ONNX_TYPE
        ),
    )


def _spec_of(node: Any, kind: str, shapeless: Container[str]) -> TensorSpec:
    name = _DATATYPE_OF_ONNX_TYPE.get(node.type)
    if name is None:
        raise StartError(
            f"{kind} {node.name!r} is of type {node.type}, which the protocol cannot carry; {_advice(node.type)}"
        )
    if not node.shape and node.name in shapeless:
        return TensorSpec(node.name, DATATYPES[name], ("",), any_rank=True)
    dims = tuple(dim if isinstance(dim, int) and dim >= 0 else str(dim or "") for dim in node.shape)
    return TensorSpec(node.name, DATATYPES[name], dims)


def _advice(kind: str) -> str:
    if kind.startswith("seq(map("):
        return (
            "the ZipMap operator of a classifier produces it; export the model without ZipMap (in skl2onnx "
            "options={'zipmap': False}, in onnxmltools zipmap=False)"
        )
    return f"export the model with tensors of {', '.join(_DATATYPE_OF_ONNX_TYPE)} only"
