"""Axes of requests: of length zero, on some of which ONNX Runtime aborts the process; without rows; and of one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.batcher import Tensor
from tensorferry.protos.tensors import TensorError, element_count
from tensorferry.server.errors import InvalidRequestError, NotReadyError
from tensorferry.server.signature import Signature, TensorSpec

# An input's name, and the number of an axis.
Axis = tuple[str, int]
AxisSet = frozenset[Axis]

# With more symbols than this, only each one alone and all together are tested, not every combination.
_MAX_COMBINED = 3


@dataclass(slots=True)
class EmptyAxes:
    """The results of the tests.

    `verdicts` has, by the axes that have length zero together, why the model fails; "" if it does not. A combination that
    was not tested counts as failing. None while the tests run; they replace it once, from their thread.
    """

    verdicts: Mapping[AxisSet, str] | None = field(default_factory=dict)

    def check(self, model: str, signature: Signature, tensors: Sequence[Tensor]) -> None:
        """Raise InvalidRequestError if a request has axes of length zero that the model is not known to accept.

        NotReadyError if that is not known yet. `tensors` are the request's, in the signature's order. Axes that the model
        fixes to zero are not checked.
        """
        empty = [
            (spec, axis, tensor.shape)
            for spec, tensor in zip(signature.inputs, tensors, strict=True)
            if 0 in tensor.shape
            for axis, dim, size in spec.axes(tensor.shape)
            if size == 0 and not isinstance(dim, int)
        ]
        if not empty:
            return
        found = " and ".join(
            f"axis {spec.clients_axis(axis)} of input {spec.name!r} (shape {list(spec.rows_placed(shape))})"
            for spec, axis, shape in empty
        )
        if self.verdicts is None:
            raise NotReadyError(
                f"{found} has length zero, and model {model!r} is still being tried with that: send it again in a few seconds"
            )
        reason = self.verdicts.get(
            frozenset((spec.name, axis) for spec, axis, _ in empty), "this was not tested"
        )
        if not reason:
            return
        raise InvalidRequestError(
            f"{found} has length zero, which model {model!r} is not known to support ({reason}): send at least one "
            "element along each axis"
        )


def axis_sets_to_test(signature: Signature, *, batched: bool) -> list[AxisSet]:
    """Return the sets of axes that may have length zero together: those that share a name, and combinations.

    Axis 0 of a batched model is left out, because a request without rows is not run.
    """
    by_symbol: dict[object, set[Axis]] = {}
    for spec in signature.inputs:
        for axis, dim in enumerate(spec.dims):
            if not isinstance(dim, int) and (axis or not batched):
                by_symbol.setdefault(dim or (spec.name, axis), set()).add((spec.name, axis))
    symbols = [frozenset(axes) for axes in by_symbol.values()]
    sizes = range(1, len(symbols) + 1) if len(symbols) <= _MAX_COMBINED else (1, len(symbols))
    return [frozenset[Axis]().union(*chosen) for size in sizes for chosen in combinations(symbols, size)]


def empty_outputs(
    model: str, signature: Signature, outputs: Sequence[TensorSpec], tensors: Sequence[Tensor]
) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs of a batched model for no rows: they follow from its signature, so it does not run.

    `tensors` are the request's, in the signature's order.
    An output's dimension is known if it is fixed or has the name of an input's dimension. InvalidRequestError for an
    output of unknown shape, or of one that no array can have.
    """
    named = signature.named_lengths(tensor.shape for tensor in tensors)
    unknown = f"the request has no rows, so model {model!r} is not run, and the"
    remedy = "send at least one row, or request other outputs"
    empty = {}
    for spec in outputs:
        if spec.any_rank:
            raise InvalidRequestError(
                f"{unknown} shape of its output {spec.name!r} is not declared: {remedy}"
            )
        shape = [0]
        for axis, size in enumerate(spec.lengths(named)[1:], 1):
            if size is None:
                name = f" ({spec.dims[axis]!r})" if spec.dims[axis] else ""
                raise InvalidRequestError(
                    f"{unknown} length of axis {spec.clients_axis(axis)}{name} of its output {spec.name!r} "
                    f"{list(spec.shape)} does not follow from the inputs: {remedy}"
                )
            shape.append(size)
        try:
            element_count(shape)
        except TensorError as error:
            raise InvalidRequestError(f"output {spec.name!r} of model {model!r}: {error}") from None
        empty[spec.name] = np.empty(shape, spec.datatype.storage)
    return empty


def explain_axis_mismatch(
    error: Exception, signature: Signature, shapes: Sequence[tuple[int, ...]]
) -> Exception:
    """Return a model's error, or InvalidRequestError if axes with the same name differ in length.

    By ONNX's rules they have the same length. But exporters name axes wrongly too, and some models then give an answer. So
    no request is refused for this before the model fails.
    `shapes` are those of the request's inputs, in the signature's order.
    """
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
    if not mismatches:
        return error
    invalid = InvalidRequestError(f"{error}; {'; '.join(mismatches)}: send one length for all axes of a name")
    invalid.__cause__ = error.__cause__
    return invalid
