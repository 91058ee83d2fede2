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
class RowAxis:
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
class RowProblems:
    """Why a tensor does not keep rows apart: nodes that mix them, and nodes that could not be analysed."""

    mixes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


# For `row_indices`: all elements.
ALL = frozenset({-1})


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor.

    `rows` says where the rows of the batch are, each computed from the same row of the inputs alone.
    `problems` says why that could not be shown. With neither, the tensor does not depend on the rows'
    values; `depends_on_row_count` is then true when it depends on how many there are.
    `shape` is None when the rank is unknown, `content` None when the numbers are.
    `value_dependent` is true when the numbers depend on the values of the model's inputs.
    `row_indices` are places along the last axis where each row has its own number in the batch, or `ALL`.
    """

    shape: tuple[Size, ...] | None = None
    rows: RowAxis | None = None
    problems: RowProblems | None = None
    depends_on_row_count: bool = False
    content: Content | None = None
    value_dependent: bool = False
    row_indices: frozenset[int] = frozenset()

    @property
    def rank(self) -> int | None:
        """The number of axes, None when it is unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def is_free(self) -> bool:
        """True when the tensor does not depend on the rows at all."""
        return self.rows is None and self.problems is None and not self.depends_on_row_count


def of_content(content: Content) -> Value:
    """A tensor whose numbers are known."""
    depends_on_row_count = any(counts_rows(number) for number in content.flat)
    return Value(content.shape, depends_on_row_count=depends_on_row_count, content=content)


def integers(numbers: Iterable[Size]) -> Content:
    """A vector of sizes as the content of a tensor."""
    listed = list(numbers)
    array = np.empty(len(listed), object)
    array[:] = listed
    return array


def merged_problems(found_problems: Iterable[RowProblems | None]) -> RowProblems:
    """All the reasons, each once."""
    mixes: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for problems in found_problems:
        if problems is not None:
            mixes.update(dict.fromkeys(problems.mixes))
            unknown.update(dict.fromkeys(problems.unknown))
    return RowProblems(tuple(mixes)[:_REASONS], tuple(unknown)[:_REASONS])
