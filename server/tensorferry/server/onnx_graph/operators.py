"""The table of operators: for each, the rule that says what becomes of the rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.server.onnx_graph.values import Content, Value

DOMAIN = "ai.onnx"
ML = "ai.onnx.ml"
MICROSOFT = "com.microsoft"


class MixesRows(Exception):
    """A rule's finding that the node makes an answer depend on other rows; the message says how."""


class NotKnown(Exception):
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
            raise NotKnown(f"lacks its input {index}")
        return value

    @property
    def given(self) -> list[Value]:
        """The inputs that are not left out."""
        return [value for value in self.inputs if value is not None]

    def content(self, index: int, attribute: str = "") -> Content | None:
        """The numbers of an input, None when it is left out; an unknown one raises `NotKnown`."""
        if not self.has(index):
            return None
        content = self.input(index).content
        if content is None:
            raise NotKnown(f"takes {attribute or f'input {index}'} from numbers that are computed as it runs")
        return content


Rule = Callable[[Node], Value | Sequence[Value]]


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator's rule.

    The values of the inputs `sizes` decide the shapes of its outputs. `shape_only` is true when only the
    shapes of its inputs matter. With `by_values` the values of any input decide the shapes of its outputs.
    """

    rule: Rule
    sizes: Collection[int] = ()
    shape_only: bool = False
    by_values: bool = False


_TABLE: dict[tuple[str, str], Operator] = {}


def operator(
    *names: str,
    domain: str = DOMAIN,
    sizes: Collection[int] = (),
    shape_only: bool = False,
    by_values: bool = False,
) -> Callable[[Rule], Rule]:
    """Enter a function into the table as the rule of the operators named."""

    def enter(rule: Rule) -> Rule:
        for name in names:
            _TABLE[domain, name] = Operator(rule, sizes, shape_only, by_values)
        return rule

    return enter


def find(domain: str, name: str) -> Operator | None:
    """The operator's entry in the table, None when there is none."""
    return _TABLE.get((domain or DOMAIN, name))
