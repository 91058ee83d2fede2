"""Axes with the same name, which have the same length by ONNX's rules.

Exporters name axes wrongly too. ONNX Runtime then warns, or computes with the lengths it gets, and some models give an
answer. So the server refuses no request for this. If the model fails, the lengths are named as the likely cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.signature import Signature


def explain_axis_mismatch(
    error: Exception, signature: Signature, shapes: Sequence[tuple[int, ...]]
) -> Exception:
    """Return a model's error, or InvalidRequestError if axes with the same name differ in length.

    `shapes` are those of the request's inputs, in the signature's order.
    """
    mismatches = _axis_mismatches(signature, shapes)
    if not mismatches:
        return error
    invalid = InvalidRequestError(f"{error}; {mismatches}: send one length for all axes of a name")
    invalid.__cause__ = error.__cause__
    return invalid


def _axis_mismatches(signature: Signature, shapes: Sequence[tuple[int, ...]]) -> str:
    """Describe the axes that have the same name and differ in length; "" for none."""
    places: dict[str, list[tuple[str, int, int]]] = {}
    for spec, shape in zip(signature.inputs, shapes, strict=True):
        for axis, dim, size in spec.axes(shape):
            if isinstance(dim, str) and dim:
                places.setdefault(dim, []).append((spec.name, spec.clients_axis(axis), size))
    mismatches = []
    for dim, uses in places.items():
        if len({size for _, _, size in uses}) > 1:
            lengths = ", ".join(f"{size} (axis {axis} of input {name!r})" for name, axis, size in uses)
            mismatches.append(f"axis {dim!r} has the lengths {lengths}")
    return "; ".join(mismatches)
