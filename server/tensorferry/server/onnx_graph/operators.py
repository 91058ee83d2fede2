"""The table of operators: for each, the rule that says where the rows are in its outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.server.onnx_graph.sizes import Product, Size, unknown
from tensorferry.server.onnx_graph.values import Content, Value

# Numbers in the names of sizes that are not known: each is its own.
_fresh = itertools.count()

DOMAIN = "ai.onnx"
ML = "ai.onnx.ml"
MICROSOFT = "com.microsoft"


# Why a node is not known that takes tensors with `row_indices`.
USES_ROW_INDICES = "depends on the places of rows in the batch"


class MixesRows(Exception):
    """A rule's finding that the node makes an answer depend on other rows; the message says how."""


class UnknownEffect(Exception):
    """A rule's finding that it cannot tell what the node does to the rows; the message says why."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as its rule sees it: `inputs` are None where an optional one is left out."""

    operator: str
    opset: int
    inputs: Sequence[Value | None]
    outputs: int
    attributes: Mapping[str, Any]
    label: str = ""

    def has(self, index: int) -> bool:
        """Whether the input is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def input(self, index: int) -> Value:
        """An input that must be there."""
        value = self.inputs[index] if index < len(self.inputs) else None
        if value is None:
            raise UnknownEffect(f"lacks its input {index}")
        return value

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute, or what holds where it is left out."""
        return self.attributes.get(name, default)

    @property
    def given(self) -> list[Value]:
        """The inputs that are not left out."""
        return [value for value in self.inputs if value is not None]

    def content(self, index: int) -> Content | None:
        """The numbers of an input, None when it is left out; UnknownEffect when they are computed as the model runs."""
        if not self.has(index):
            return None
        content = self.input(index).content
        if content is None:
            raise UnknownEffect(f"takes its input {index} from numbers that are computed as it runs")
        return content

    def sizes(self, name: str, index: int) -> list[Any] | None:
        """The numbers of an attribute or else of an input, in order; None when neither is given."""
        if name in self.attributes:
            given = self.attributes[name]
            return list(given) if isinstance(given, Sequence) else [given]
        content = self.content(index)
        return None if content is None else list(content.flat)

    def integers(self, name: str, index: int) -> list[int] | None:
        """The same where they are all fixed; UnknownEffect when one is not."""
        numbers = self.sizes(name, index)
        if numbers is not None and not all(isinstance(number, (int, float)) for number in numbers):
            raise UnknownEffect(f"takes its {name} from shapes")
        return None if numbers is None else [int(number) for number in numbers]

    def fresh(self, *origins: object) -> Product:
        """A size that is not known; `origins` are those that it is computed from."""
        return unknown(f"?{next(_fresh)}", *origins)

    def fresh_shape(self, rank: int) -> tuple[Size, ...]:
        """A shape of that rank with sizes that are not known."""
        return tuple(self.fresh() for _ in range(rank))


Rule = Callable[[Node], Value | Sequence[Value]]


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator's rule.

    The values of the inputs `shape_inputs` decide the shapes of its outputs. `shape_only` is true when only the
    shapes of its inputs matter. With `shape_from_values` the values of any input decide the shapes of its outputs.
    `row_indices` is true when the rule takes tensors that have these.
    """

    rule: Rule
    shape_inputs: Collection[int] = ()
    shape_only: bool = False
    shape_from_values: bool = False
    row_indices: bool = False


_TABLE: dict[tuple[str, str], Operator] = {}


def operator(
    *names: str,
    domain: str = DOMAIN,
    shape_inputs: Collection[int] = (),
    shape_only: bool = False,
    shape_from_values: bool = False,
    row_indices: bool = False,
) -> Callable[[Rule], Rule]:
    """Enter a function into the table as the rule of the operators named."""

    def enter(rule: Rule) -> Rule:
        for name in names:
            _TABLE[domain, name] = Operator(rule, shape_inputs, shape_only, shape_from_values, row_indices)
        return rule

    return enter


def find(domain: str, name: str) -> Operator | None:
    """The operator's entry in the table, None when there is none."""
    return _TABLE.get((domain or DOMAIN, name))
