"""Where the tensors of a batch lie in one block of memory: the inputs first, then the outputs known in advance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorferry.server.signature import Signature, TensorSpec

# CUDA's own allocations have this alignment, and kernels count on it.
_ALIGNMENT = 256
_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Where one tensor lies, from the block's start."""

    spec: TensorSpec
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        """The tensor's bytes."""
        return math.prod(self.shape) * self.spec.datatype.size

    @property
    def element_type(self) -> Any:
        """The type of its elements, as ONNX Runtime takes it."""
        return _ONNX_BFLOAT16 if self.spec.datatype.name == "BF16" else self.spec.datatype.storage


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The places of a batch's tensors. `unknown` are the outputs whose shapes only a run tells.

    The first `input_bytes` hold the inputs, all `nbytes` the outputs as well.
    """

    inputs: tuple[TensorPlacement, ...]
    outputs: tuple[TensorPlacement, ...]
    unknown: tuple[TensorSpec, ...]
    input_bytes: int
    nbytes: int


def tensor_layout_for(
    signature: Signature, shapes: Mapping[str, Shape], *, outputs: bool = True
) -> TensorLayout:
    """The layout of a batch whose inputs have these shapes; without `outputs`, none of them is known.

    An output is known if each of its dimensions is fixed, or varies under a name that an input has too.
    """
    at = 0
    inputs = []
    sizes: dict[str, int] = {}
    for spec in signature.inputs:
        shape = shapes[spec.name]
        inputs.append(TensorPlacement(spec, shape, at))
        at += _aligned(inputs[-1].nbytes)
        for dim, size in zip(spec.dims, shape, strict=True):
            if isinstance(dim, str) and dim:
                # Of a name that stands for two sizes nothing can be told.
                sizes[dim] = size if sizes.get(dim, size) == size else -1
    input_bytes = at
    known, unknown = [], []
    for spec in signature.outputs:
        shape = tuple(dim if isinstance(dim, int) else sizes.get(dim, -1) for dim in spec.dims)
        if -1 in shape or not outputs:
            unknown.append(spec)
            continue
        known.append(TensorPlacement(spec, shape, at))
        at += _aligned(known[-1].nbytes)
    return TensorLayout(tuple(inputs), tuple(known), tuple(unknown), input_bytes, at)


def _aligned(nbytes: int) -> int:
    # Of nothing, too, something: no two tensors have one address.
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
