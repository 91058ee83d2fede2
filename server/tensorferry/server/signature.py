"""What an ONNX model takes and gives: names, datatypes, shapes, and whether they carry a batch axis."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output. A dimension is its size, or the name of what varies ('' if it has none).

    `counts_rows` says of an output that its first dimension was seen to vary with the rows, though the file fixes it to 1.
    With `any_rank` the file says nothing of the shape; `dims` is then one that varies, for axis 0.
    """

    name: str
    datatype: Datatype
    dims: tuple[int | str, ...]
    counts_rows: bool = False
    any_rank: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as the protocol gives it: -1 for a dimension that varies."""
        return tuple(dim if isinstance(dim, int) else -1 for dim in self.dims)

    def along(self, shape: tuple[int, ...]) -> Iterator[tuple[int, int | str, int]]:
        """Each axis of a tensor of this shape, which fits: its number, the dimension here, and its length."""
        dims = ("",) * len(shape) if self.any_rank else self.dims
        for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            yield axis, dim, size

    def __str__(self) -> str:
        return f"{self.name}: {self.datatype.name}{'[...]' if self.any_rank else list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """A model's inputs and outputs, in the model's order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def lacks_batch_axis(self) -> str | None:
        """Why the model has no batch axis; None when every input and output leads with one that varies."""
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            for spec in specs:
                if kind == "input" and spec.any_rank:
                    return f"the file does not say how many dimensions input {spec.name!r} has"
                if not spec.dims:
                    return f"{kind} {spec.name!r} is a scalar"
                if isinstance(spec.dims[0], int):
                    return f"the first dimension of {kind} {spec.name!r} is fixed to {spec.dims[0]}"
        return None if self.inputs else "the model has no inputs"

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.inputs))}) -> ({', '.join(map(str, self.outputs))})"


def signature_of(inputs: Iterable[Any], outputs: Iterable[Any], shapeless: Container[str] = ()) -> Signature:
    """The signature in ONNX Runtime's node descriptions (`name`, `type`, `shape`).

    They describe what has no shape as a scalar: `shapeless` has the names of the former. StartError names an input
    or output that the protocol has no datatype for.
    """
    return Signature(
        tuple(_spec_of(node, "input", shapeless) for node in inputs),
        tuple(_spec_of(node, "output", shapeless) for node in outputs),
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
