"""What an ONNX model takes and gives: names, datatypes, shapes, and whether they carry a batch axis."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tensorferry.protos.tensors import DATATYPES, Datatype
from tensorferry.server.errors import StartError

_DATATYPE_OF_ONNX_TYPE = {
    "tensor(bool)": "BOOL",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16",
    "tensor(string)": "BYTES",
}


# Of an input that requests of a batch have in common: each request's is compared with the others'. Strings count one each.
_MOST_SHARED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output. A dimension is its size, or the name of what varies ('' if it has none).

    `counts_rows` says of an output that its first dimension was seen to vary with the rows, though the file fixes it to 1.
    With `any_rank` the file says nothing of the shape; `dims` is then one that varies, for axis 0. An `optional` input has
    a value in the file, which counts where a request gives none.
    """

    name: str
    datatype: Datatype
    dims: tuple[int | str, ...]
    counts_rows: bool = False
    any_rank: bool = False
    optional: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as the protocol gives it: -1 for a dimension that varies."""
        return tuple(dim if isinstance(dim, int) else -1 for dim in self.dims)

    @property
    def has_row_axis(self) -> bool:
        """Whether axis 0 varies, and so counts the rows if the model is batched. That of an optional input never does."""
        return bool(self.dims) and not isinstance(self.dims[0], int) and not self.optional

    def axes(self, shape: tuple[int, ...]) -> Iterator[tuple[int, int | str, int]]:
        """Each axis of a tensor of this shape, which fits: its number, the dimension here, and its length."""
        dims = ("",) * len(shape) if self.any_rank else self.dims
        for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            yield axis, dim, size

    def __str__(self) -> str:
        return f"{self.name}: {self.datatype.name}{'[...]' if self.any_rank else list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """A model's inputs and outputs, in the model's order. `optional` are inputs that a request may leave out."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    optional: tuple[TensorSpec, ...] = ()

    def with_given_inputs(self, names: Collection[str]) -> Signature:
        """The signature of a request with these inputs: the optional ones among them are inputs as the others."""
        extra = tuple(spec for spec in self.optional if spec.name in names)
        return replace(self, inputs=self.inputs + extra, optional=()) if extra else self

    def no_batch_axis_reason(self) -> str | None:
        """Why the model has no batch axis; None when an input and every output leads with one that varies.

        Other inputs may be small and of a fixed shape: requests share a batch if theirs are equal.
        """
        none_leads = not any(spec.has_row_axis for spec in self.inputs)
        for spec in self.inputs:
            if spec.any_rank:
                return f"the file does not say how many dimensions input {spec.name!r} has"
            if spec.has_row_axis or not (none_leads or _too_much_to_share(spec)):
                continue
            return _no_rows("input", spec)
        for spec in self.outputs:
            if not spec.has_row_axis:
                return _no_rows("output", spec)
        return None if self.inputs else "the model has no inputs"

    def shared_inputs(self, *, batched: bool) -> frozenset[int]:
        """The places of the inputs without rows, if the model is batched: equal ones may share a batch."""
        if not batched:
            return frozenset()
        return frozenset(at for at, spec in enumerate(self.inputs) if not spec.has_row_axis)

    def __str__(self) -> str:
        inputs = [str(spec) for spec in self.inputs]
        if self.optional:
            # There may be hundreds: all weights, as some exporters write them.
            inputs.append(f"{len(self.optional)} optional")
        return f"({', '.join(inputs)}) -> ({', '.join(map(str, self.outputs))})"


def _too_much_to_share(spec: TensorSpec) -> bool:
    if not all(isinstance(dim, int) for dim in spec.dims):
        return True
    elements = math.prod(dim for dim in spec.dims if isinstance(dim, int))
    return elements * (spec.datatype.size or 1) > _MOST_SHARED_BYTES


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
    """The signature in ONNX Runtime's node descriptions (`name`, `type`, `shape`).

    They describe what has no shape as a scalar: `shapeless` has the names of the former. StartError names an input
    or output that the protocol has no datatype for.
    """
    return Signature(
        tuple(_spec_of(node, "input", shapeless) for node in inputs),
        tuple(_spec_of(node, "output", shapeless) for node in outputs),
        tuple(
            replace(_spec_of(node, "input", shapeless), optional=True)
            for node in optional
            # One that the protocol cannot carry is never given.
            if node.type in _DATATYPE_OF_ONNX_TYPE
        ),
    )


def _spec_of(node: Any, kind: str, shapeless: Container[str]) -> TensorSpec:
    name = _DATATYPE_OF_ONNX_TYPE.get(node.type)
    if name is None:
        raise StartError(
            f"{kind} {node.name!r} is of type {node.type}, which the protocol cannot carry; {_cure(node.type)}"
        )
    if not node.shape and node.name in shapeless:
        return TensorSpec(node.name, DATATYPES[name], ("",), any_rank=True)
    dims = tuple(dim if isinstance(dim, int) and dim >= 0 else str(dim or "") for dim in node.shape)
    return TensorSpec(node.name, DATATYPES[name], dims)


def _cure(kind: str) -> str:
    if kind.startswith("seq(map("):
        return (
            "a ZipMap makes it of the probabilities of a classifier: export the model without (in skl2onnx "
            "options={'zipmap': False}, in onnxmltools zipmap=False)"
        )
    return f"export the model with tensors of {', '.join(_DATATYPE_OF_ONNX_TYPE)} only"
