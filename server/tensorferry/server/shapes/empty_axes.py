"""Axes of length zero: which of them a model is known to bear. ONNX Runtime aborts the process for some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from tensorferry.batcher import Tensor
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.signature import Signature

# An input's name and the number of its axis.
Axis = tuple[str, int]
AxisSet = frozenset[Axis]

# Every combination of at most this number of symbols is tried; of more symbols, each alone and all together.
_MOST_COMBINED = 3


@dataclass(frozen=True, slots=True)
class EmptyAxes:
    """What was found out at load: by the axes that have length zero at once, why not, or "" where it is safe.

    A combination that was not tried is not known to be safe.
    """

    verdicts: Mapping[AxisSet, str] = field(default_factory=dict)

    def check(self, model: str, signature: Signature, tensors: Sequence[Tensor]) -> None:
        """InvalidRequestError names the inputs and axes of length zero, unless the model bears them.

        `tensors` are a request's, in the signature's order. An axis whose length is fixed to zero is the model's own.
        """
        empty = [
            (spec.name, axis, tensor.shape)
            for spec, tensor in zip(signature.inputs, tensors, strict=True)
            if 0 in tensor.shape
            for axis, dim, size in spec.axes(tensor.shape)
            if size == 0 and not isinstance(dim, int)
        ]
        if not empty:
            return
        reason = self.verdicts.get(frozenset((name, axis) for name, axis, _ in empty), "this was not tried")
        if not reason:
            return
        found = " and ".join(
            f"axis {axis} of input {name!r} (shape {list(shape)})" for name, axis, shape in empty
        )
        raise InvalidRequestError(
            f"{found} has length zero, which model {model!r} is not known to bear ({reason}): send at least one "
            "element along each axis"
        )


def axis_sets_to_test(signature: Signature, *, batched: bool) -> list[AxisSet]:
    """What may have length zero at once: the axes that share a name, and combinations of such sets.

    Without axis 0 of a model that is batched: a request of no rows is not run.
    """
    by_symbol: dict[object, set[Axis]] = {}
    for spec in signature.inputs:
        for axis, dim in enumerate(spec.dims):
            if not isinstance(dim, int) and (axis or not batched):
                by_symbol.setdefault(dim or (spec.name, axis), set()).add((spec.name, axis))
    symbols = [frozenset(axes) for axes in by_symbol.values()]
    sizes = range(1, len(symbols) + 1) if len(symbols) <= _MOST_COMBINED else (1, len(symbols))
    return [frozenset[Axis]().union(*chosen) for size in sizes for chosen in combinations(symbols, size)]
