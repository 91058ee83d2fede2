"""Properties of a tensor that are known before the model runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.server.onnx.graph.sizes import NUMBER_OF_ROWS, Product, Size, counts_rows, product

# The numbers of a small tensor: an object array of integers, symbolic sizes, booleans and floats.
Content = npt.NDArray[Any]

# Most reasons kept of each kind.
_REASONS = 8


class MixesRows(Exception):
    """The node makes a row's output depend on other rows. The message says how."""


class AlwaysFails(Exception):
    """The node fails whatever the values of its inputs are."""


class UnknownEffect(Exception):
    """The rule cannot determine what the node does to the rows. The message says why."""


@dataclass(frozen=True, slots=True)
class RowAxis:
    """The axis of a tensor that has the rows of the batch. Its size is outer × rows × inner.

    `outer` and `inner` differ from 1 only if Reshape merged other axes with the batch axis.
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
    """Why the rows of a tensor may not be independent: nodes that mix rows, and nodes that could not be analysed."""

    mixes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


# Value of `row_indices`: all elements.
ALL = frozenset({-1})


@dataclass(frozen=True, slots=True)
class Value:
    """Known properties of a tensor.

    `rows` is the row axis; each row depends only on the same row of the inputs. `problems` says why this could not be
    shown. A tensor with neither does not depend on the rows' values; `depends_on_row_count` says whether it depends on
    their number. `shape` is None if the rank is unknown, `content` None if the numbers are. `value_dependent` says
    whether the numbers depend on the values of the model's inputs. `row_indices` are the positions on the last axis
    at which each row holds its own index in the batch, or `ALL`.

    Only in the body of a loop whose iterations may be the rows of the batch: `iterations` are the loops whose iteration
    number it depends on, `picked` those in which it depends on the row that this number picks. Outside, the outputs of
    such a loop have `problems`. `row_parts`: it is a sequence of parts of the batch axis, and `shape` that of a part.

    `fails`: every run that computes the tensor fails, whatever else is said here. So no answer depends on it.
    """

    shape: tuple[Size, ...] | None = None
    rows: RowAxis | None = None
    problems: RowProblems | None = None
    depends_on_row_count: bool = False
    content: Content | None = None
    value_dependent: bool = False
    row_indices: frozenset[int] = frozenset()
    iterations: frozenset[str] = frozenset()
    picked: frozenset[str] = frozenset()
    row_parts: bool = False
    fails: bool = False

    @property
    def rank(self) -> int | None:
        """The number of axes; None if it is unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The shape; raises UnknownEffect if the rank is unknown."""
        if self.shape is None:
            raise UnknownEffect("takes a tensor of unknown rank")
        return self.shape

    @property
    def is_free(self) -> bool:
        """Whether the tensor does not depend on the rows at all."""
        return (
            self.rows is None
            and self.problems is None
            and not self.fails
            and not (self.depends_on_row_count or self.iterations or self.picked)
        )


def mixing(*reasons: str) -> Value:
    """Return a tensor whose rows depend on each other for these reasons."""
    return Value(problems=RowProblems(mixes=reasons), value_dependent=True)


def not_analysed(*reasons: str) -> Value:
    """Return a tensor of which nothing is known for these reasons."""
    return Value(problems=RowProblems(unknown=reasons), value_dependent=True)


def of_content(content: Content) -> Value:
    """Return a tensor with known numbers."""
    return Value(content.shape, depends_on_row_count=has_row_counts(content), content=content)


def has_row_counts(content: Content) -> bool:
    """Whether one of the numbers depends on the number of rows in the batch."""
    return any(counts_rows(number) for number in content.flat if isinstance(number, Product))


def vector_of(numbers: Iterable[Size]) -> Content:
    """Return a vector of sizes as the content of a tensor."""
    return np.array(list(numbers), object)


def merged_problems(found_problems: Iterable[RowProblems | None]) -> RowProblems | None:
    """Return all reasons, each once; None if there are none."""
    mixes: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for problems in found_problems:
        if problems is not None:
            mixes.update(dict.fromkeys(problems.mixes))
            unknown.update(dict.fromkeys(problems.unknown))
    return RowProblems(tuple(mixes)[:_REASONS], tuple(unknown)[:_REASONS]) if mixes or unknown else None
