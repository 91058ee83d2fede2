"""Layout of a batch's tensors in one block of memory: the inputs first, then the outputs of known shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tensorferry.server.signature import Signature, TensorSpec

# CUDA aligns its own allocations to this many bytes, and kernels rely on it.
_ALIGNMENT = 256
ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Shape of one tensor, and its offset in bytes from the start of the block."""

    spec: TensorSpec
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.spec.datatype.size

    @property
    def element_type(self) -> Any:
        """Element type in the form that ONNX Runtime takes."""
        return ONNX_BFLOAT16 if self.spec.datatype.name == "BF16" else self.spec.datatype.storage


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Placements of a batch's tensors. `unknown` lists the outputs whose shapes are known only after the run.

    Inputs and outputs together take the first `nbytes` of the block.
    """

    inputs: tuple[TensorPlacement, ...]
    outputs: tuple[TensorPlacement, ...]
    unknown: tuple[TensorSpec, ...]
    nbytes: int


def tensor_layout_for(
    signature: Signature, shapes: Mapping[str, Shape], *, outputs: bool = True
) -> TensorLayout:
    """Return the layout of a batch with these input shapes. Without `outputs`, every output's shape is unknown.

    An output's shape is known if each dimension is fixed or has the name of a dimension of an input.
    """
    offset = 0
    inputs = []
    for spec in signature.inputs:
        inputs.append(TensorPlacement(spec, shapes[spec.name], offset))
        offset += aligned(inputs[-1].nbytes)
    named = signature.named_lengths(place.shape for place in inputs)
    known, unknown = [], []
    for spec in signature.outputs:
        lengths = spec.lengths(named)
        shape = tuple(length for length in lengths if length is not None)
        if len(shape) < len(lengths) or not outputs:
            unknown.append(spec)
            continue
        known.append(TensorPlacement(spec, shape, offset))
        offset += aligned(known[-1].nbytes)
    return TensorLayout(tuple(inputs), tuple(known), tuple(unknown), offset)


def ranges_of(places: Iterable[TensorPlacement]) -> list[tuple[int, int]]:
    """Return the first and last offsets of parts of the block that have these tensors and no others."""
    ranges: list[tuple[int, int]] = []
    for place in places:
        start, end = place.offset, place.offset + aligned(place.nbytes)
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, end))
    return ranges


def aligned(nbytes: int) -> int:
    """Return how many bytes of a block a tensor takes."""
    # An empty tensor takes space too, so that no two tensors share an address.
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
