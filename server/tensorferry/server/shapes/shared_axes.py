"""Axes of one name: ONNX says that they have one length.

Exporters name axes wrongly, too, and ONNX Runtime then only warns, or computes with the lengths that came. So no request
is refused for lengths that differ: some models answer it. If the model fails on such a request, the lengths are
the likely cause, and the client can do something about them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.signature import Signature


def explain_axis_mismatch(
    error: Exception, signature: Signature, shapes: Sequence[tuple[int, ...]]
) -> Exception:
    """The error with which a model failed; InvalidRequestError instead if axes of one name differ in length.

    `shapes` are those of the request's inputs, in the signature's order.
    """
    differing = _disagreement(signature, shapes)
    if not differing:
        return error
    invalid = InvalidRequestError(f"{error}; {differing}: send one length for all axes of a name")
    invalid.__cause__ = error.__cause__
    return invalid


def _disagreement(signature: Signature, shapes: Sequence[tuple[int, ...]]) -> str:
    """Which axes of one name differ in length, in words; "" when none do."""
    places: dict[str, list[tuple[str, int, int]]] = {}
    for spec, shape in zip(signature.inputs, shapes, strict=True):
        for axis, dim, size in spec.axes(shape):
            if isinstance(dim, str) and dim:
                places.setdefault(dim, []).append((spec.name, axis, size))
    found = []
    for dim, those in places.items():
        if len({size for _, _, size in those}) > 1:
            lengths = ", ".join(f"{size} (axis {axis} of input {name!r})" for name, axis, size in those)
            found.append(f"axis {dim!r} has the lengths {lengths}")
    return "; ".join(found)
