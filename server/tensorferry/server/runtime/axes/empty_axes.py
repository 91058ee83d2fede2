"""Axes of length zero: which ones a model accepts. ONNX Runtime aborts the process on some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from tensorferry.batcher import Tensor
from tensorferry.server.errors import InvalidRequestError, NotReadyError
from tensorferry.server.signature import Signature

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
