"""Tensors on the wire: raw and typed contents of every datatype, and any shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fuzz.target import ANSWERED, FindingError, Shape, Target, code_of, timed
from fuzz.world import WORDS

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import (
    DATATYPES,
    Datatype,
    TensorError,
    datatype,
    decode_contents,
    decode_raw,
    encode_contents,
    encode_raw,
)


class TensorsTarget(Target):
    """An input is a request; each of its inputs is decoded and encoded again: the bytes must be equal."""

    name = "tensors"
    words: Sequence[str] = (*WORDS, *DATATYPES)

    def __init__(self, directory: Path) -> None:
        """Ignore the directory."""

    def seeds(self) -> Sequence[bytes]:
        made = []
        for name, kind in DATATYPES.items():
            for shape in ([], [0], [2], [1, 3]):
                count = int(np.prod(shape))
                raw = bytes(range(24))[: kind.size * count] if kind.size else b"\1\0\0\0a" * count
                message = pb.ModelInferRequest(raw_input_contents=[raw])
                message.inputs.add(name="x", datatype=name, shape=shape)
                made.append(message)
                if kind.contents:
                    typed = pb.ModelInferRequest()
                    tensor = typed.inputs.add(name="x", datatype=name, shape=shape)
                    # Only 0 and 1 are bytes of a BOOL.
                    array = decode_raw(raw, kind, shape) if name != "BOOL" else np.ones(shape, bool)
                    encode_contents(array, kind, tensor.contents)
                    made.append(typed)
        return [message.SerializeToString(deterministic=True) for message in made]

    def shape(self, data: bytes) -> Shape:
        return Shape(b"", pb.ModelInferRequest)

    def run(self, data: bytes) -> str:
        try:
            message = pb.ModelInferRequest.FromString(data)
        except Exception:
            return "INVALID_ARGUMENT"
        code = ANSWERED
        raws = list(message.raw_input_contents)
        with timed():
            for index, tensor in enumerate(message.inputs):
                try:
                    kind = datatype(tensor.datatype)
                    if index < len(raws):
                        _check_raw(raws[index], kind, tuple(tensor.shape))
                    else:
                        _check_typed(tensor.contents, kind, tuple(tensor.shape))
                except TensorError as error:
                    code = code_of(error)
        return code


def _check_raw(raw: bytes, kind: Datatype, shape: tuple[int, ...]) -> None:
    array = decode_raw(raw, kind, shape)
    if (array.dtype, array.shape) != (kind.storage, shape):
        raise FindingError(f"{kind.name} of shape {shape} was decoded to {array.dtype} {array.shape}")
    if encode_raw(array) != raw:
        raise FindingError(f"{kind.name} of shape {shape} is encoded to other bytes")


def _check_typed(contents: pb.InferTensorContents, kind: Datatype, shape: tuple[int, ...]) -> None:
    array = decode_contents(contents, kind, shape)
    if (array.dtype, array.shape) != (kind.storage, shape):
        raise FindingError(f"{kind.name} of shape {shape} was decoded to {array.dtype} {array.shape}")
    again = pb.InferTensorContents()
    encode_contents(array, kind, again)
    # NaN equals nothing, so the bytes are compared.
    kept = pb.InferTensorContents()
    if kind.contents is not None:
        getattr(kept, kind.contents).extend(getattr(contents, kind.contents))
    if again.SerializeToString() != kept.SerializeToString():
        raise FindingError(f"{kind.name} of shape {shape} is encoded to other contents")
