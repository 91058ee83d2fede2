"""The ladder: the shapes of batch for which a CUDA graph is captured, and which of them a batch is padded up to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tensorferry.server.gpu.tensor_layout import Shape


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """A rung that was asked for: its rows, 0 for a model without a batch axis, and the inputs' other dimensions.

    `dims` has the inputs for which they vary.
    """

    rows: int
    dims: tuple[tuple[str, Shape], ...] = ()


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Which CUDA graphs are wanted; without `specs`, those of the powers of two up to max_batch_size.

    `required`: the model's own configuration asks for them, so it is not served without.
    """

    specs: tuple[GraphSpec, ...] = ()
    required: bool = False


class CapturedShapes:
    """Rungs by the inputs' shapes. With `pads`, a batch goes up to the next one that has enough rows."""

    def __init__(self, rungs: Iterable[Mapping[str, Shape]], *, pads: bool) -> None:
        self._exact: dict[tuple[Shape, ...], Mapping[str, Shape]] = {}
        # By all dimensions but the rows, the rows ascending; nothing without padding.
        self._rows: dict[tuple[Shape, ...], list[int]] = {}
        for rung in rungs:
            self._exact[tuple(rung.values())] = rung
        if pads:
            for shapes in self._exact:
                self._rows.setdefault(_rest(shapes), []).append(shapes[0][0])
            for rows in self._rows.values():
                rows.sort()

    def captured_shape(self, shapes: Mapping[str, Shape]) -> Mapping[str, Shape] | None:
        """The shapes of the rung for a batch of these, in the same order of inputs; None if there is none."""
        key = tuple(shapes.values())
        if key in self._exact:
            return self._exact[key]
        rest, rows = _rest(key), key[0][0]
        rungs = self._rows.get(rest, ())
        at = bisect_left(rungs, rows)
        if at == len(rungs) or rows == 0:
            return None
        return self._exact[tuple((rungs[at], *dims) for dims in rest)]


def _rest(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    return tuple(shape[1:] for shape in shapes)
