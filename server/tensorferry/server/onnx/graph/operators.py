"""The table of operators: each has a rule that computes the row axis of its outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tensorferry.server.onnx.graph.sizes import Product, Size, unknown
from tensorferry.server.onnx.graph.values import Content, UnknownEffect, Value

# Makes the names of unknown sizes unique.
_fresh = itertools.count()

DOMAIN = "ai.onnx"
ML = "ai.onnx.ml"
MICROSOFT = "com.microsoft"


# The reason for a node with an unknown effect on tensors with `row_indices`.
USES_ROW_INDICES = "depends on the indices of rows in the batch"
# The reason for an operator without a rule, or with one for some inputs only.
NOT_ANALYSED = "is an operator that cannot be analysed"


def axis_of(axis: int, rank: int) -> int:
    """Return the axis as a non-negative index."""
    if not -rank <= axis < max(rank, 1):
        raise UnknownEffect(f"has axis {axis} for a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


@dataclass(frozen=True, slots=True)
class Node:
    """A node as its rule sees it. An optional input that is left out is None."""

    operator: str
    opset: int
    inputs: Sequence[Value | None]
    outputs: int
    attributes: Mapping[str, Any]
    label: str

    def has(self, index: int) -> bool:
        """Whether the input is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def input(self, index: int) -> Value:
        """Return a required input; raise UnknownEffect if it is missing."""
        value = self.inputs[index] if index < len(self.inputs) else None
        if value is None:
            raise UnknownEffect(f"lacks its input {index}")
        return value

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or its default."""
        return self.attributes.get(name, default)

    def shape(self, index: int) -> tuple[Size, ...]:
        """Return the shape of a required input; raise UnknownEffect if the rank is unknown."""
        return self.input(index).sizes

    def axis(self, default: int, more: int = 0) -> int:
        """Return the attribute `axis` as an index into the shape of input 0 with `more` axes."""
        return axis_of(int(self.attribute("axis", default)), len(self.shape(0)) + more)

    def axes(self, given: Iterable[int] | None) -> list[int]:
        """Return axes of input 0 as non-negative indices; all axes if none are given."""
        rank = len(self.shape(0))
        return [axis_of(axis, rank) for axis in (range(rank) if given is None else given)]

    @property
    def given(self) -> list[Value]:
        """The inputs that are not left out."""
        return [value for value in self.inputs if value is not None]

    def content(self, index: int) -> Content | None:
        """Return the numbers of an input; None if it is left out. UnknownEffect if they are computed at run time."""
        if not self.has(index):
            return None
        content = self.input(index).content
        if content is None:
            raise UnknownEffect(f"has an input {index} that is computed at run time")
        return content

    def sizes(self, name: str, index: int) -> list[Any] | None:
        """Return the numbers of an attribute or else of an input, in order; None if neither is given."""
        if name in self.attributes:
            given = self.attributes[name]
            return list(given) if isinstance(given, Sequence) else [given]
        content = self.content(index)
        return None if content is None else list(content.flat)

    def integers(self, name: str, index: int) -> list[int] | None:
        """Return the same numbers as integers; raise UnknownEffect if one is symbolic."""
        numbers = self.sizes(name, index)
        if numbers is not None and not all(isinstance(number, (int, float)) for number in numbers):
            raise UnknownEffect(f"computes its {name} from shapes")
        return None if numbers is None else [int(number) for number in numbers]

    def fresh(self, *origins: object) -> Product:
        """Return a new unknown size, computed from `origins` or, without these, from the known numbers of the inputs."""
        contents = [] if origins else [value.content for value in self.given if value.content is not None]
        return unknown(f"?{next(_fresh)}", *origins, *(number for one in contents for number in one.flat))

    def fresh_shape(self, rank: int) -> tuple[Size, ...]:
        """Return a shape of that rank with unknown sizes."""
        return tuple(self.fresh() for _ in range(rank))


Rule = Callable[[Node], Value | Sequence[Value]]
_Rule = TypeVar("_Rule", bound=Rule)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator's rule.

    The values of the inputs `shape_inputs` determine the shapes of the outputs; with `shape_from_values`, those of any
    input do. `shape_only` means that only the shapes of the inputs matter. `row_indices` means that the rule accepts
    tensors with row indices, `accepts_problems` that it accepts tensors with problems.
    """

    rule: Rule
    shape_inputs: Collection[int] = ()
    shape_only: bool = False
    shape_from_values: bool = False
    row_indices: bool = False
    accepts_problems: bool = False


_TABLE: dict[tuple[str, str], Operator] = {}


def operator(names: str, domain: str = DOMAIN, **facts: Any) -> Callable[[_Rule], _Rule]:
    """Register a function as the rule of the named operators; `facts` are fields of `Operator`."""

    def enter(rule: _Rule) -> _Rule:
        _TABLE.update(dict.fromkeys([(domain, name) for name in names.split()], Operator(rule, **facts)))
        return rule

    return enter


def find(domain: str, name: str) -> Operator | None:
    """Return the operator's entry in the table, or None."""
    return _TABLE.get((domain or DOMAIN, name))
