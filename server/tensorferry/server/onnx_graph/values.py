"""What is known of a tensor in the graph before the model runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.server.onnx_graph.sizes import NUMBER_OF_ROWS, Size, counts_rows, product

# Numbers in a small tensor: integers, sizes, booleans and floats, in an array of objects.
Content = npt.NDArray[Any]

# Reasons kept of each kind: the first say enough.
_REASONS = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a batch are in a tensor: its axis `axis` has the size outer × rows × inner.

    `outer` and `inner` are 1 but for axes that were merged with the batch axis by Reshape.
    """

    axis: int
    outer: Size = 1
    inner: Size = 1

    @property
    def size(self) -> Size:
        """The size of the axis."""
        return product(self.outer, NUMBER_OF_ROWS, self.inner)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a tensor does not keep rows apart: nodes that mix them, and nodes that could not be analysed."""

    mixes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


# For `row_numbers`: all elements.
ALL = frozenset({-1})


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor.

    `rows` says where the rows of the batch are, each computed from the same row of the inputs alone.
    `trouble` says why that could not be shown. With neither, the tensor does not depend on the rows'
    values; `counted` is then true when it depends on how many there are.
    `shape` is None when the rank is unknown, `content` None when the numbers are.
    `by_values` is true when the numbers depend on the values of the model's inputs.
    `row_numbers` are places along the last axis where each row has its own number in the batch, or `ALL`.
    """

    shape: tuple[Size, ...] | None = None
    rows: Rows | None = None
    trouble: Trouble | None = None
    counted: bool = False
    content: Content | None = None
    by_values: bool = False
    row_numbers: frozenset[int] = frozenset()

    @property
    def rank(self) -> int | None:
        """The number of axes, None when it is unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def is_free(self) -> bool:
        """True when the tensor does not depend on the rows at all."""
        return self.rows is None and self.trouble is None and not self.counted


def of_content(content: Content) -> Value:
    """A tensor whose numbers are known."""
    counted = any(counts_rows(number) for number in content.flat)
    return Value(content.shape, counted=counted, content=content)


def integers(numbers: Iterable[Size]) -> Content:
    """A vector of sizes as the content of a tensor."""
    listed = list(numbers)
    array = np.empty(len(listed), object)
    array[:] = listed
    return array


def joined(troubles: Iterable[Trouble | None]) -> Trouble:
    """All the reasons, each once."""
    mixes: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for trouble in troubles:
        if trouble is not None:
            mixes.update(dict.fromkeys(trouble.mixes))
            unknown.update(dict.fromkeys(trouble.unknown))
    return Trouble(tuple(mixes)[:_REASONS], tuple(unknown)[:_REASONS])
