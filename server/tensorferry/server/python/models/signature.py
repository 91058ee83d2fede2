"""Signature of a Python function, from its declared types."""

from __future__ import annotations

from dataclasses import replace

from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.serving import FunctionModel, TensorType


def signature_of_function(declared: FunctionModel) -> Signature:
    """Return the signature that clients see. A function of one row gets the axis of rows in front."""
    return Signature(
        tuple(
            replace(_spec(name, type_, declared.batched), most_bytes=declared.most_request_bytes)
            for name, type_ in declared.inputs.items()
        ),
        tuple(_spec(name, type_, declared.batched) for name, type_ in declared.outputs.items()),
    )


def _spec(name: str, type_: TensorType, batched: bool) -> TensorSpec:
    dims = tuple("" if dim == -1 else dim for dim in type_.dims)
    return TensorSpec(
        name,
        DATATYPES[type_.datatype],
        dims if batched else ("", *dims),
        binary=type_.datatype == "BYTES" and not type_.text,
    )
