"""Order of nodes that exchange tensors: which node produces each tensor, and which nodes can run after which."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

# The tensors that a node reads, and those that it gives.
Node = tuple[Collection[str], Collection[str]]


@dataclass(frozen=True, slots=True)
class Dag:
    """Nodes, by their numbers, in an order in which they can run.

    `producers` has the first node that gives each tensor. `clash` is the first tensor that a node gives although it is an
    input, or another node gives it, with the number of that node. `order` has each node after the producers of what it
    reads, otherwise as given. `stuck` has the nodes that can never run. `available` are the inputs and what the others
    give, and `missing` the tensors that a node reads and nothing gives.
    """

    producers: dict[str, int]
    clash: tuple[str, int] | None
    order: tuple[int, ...]
    stuck: tuple[int, ...]
    available: frozenset[str]
    missing: tuple[str, ...]


def dag_of(nodes: Sequence[Node], inputs: Iterable[str]) -> Dag:
    """Return the order of these nodes, whose graph has the inputs. Callers refuse what they do not allow."""
    available = set(inputs)
    producers: dict[str, int] = {}
    clash: tuple[str, int] | None = None
    for number, (_, gives) in enumerate(nodes):
        for tensor in gives:
            if clash is None and (tensor in available or tensor in producers):
                clash = tensor, number
            producers.setdefault(tensor, number)
    order: list[int] = []
    left = list(range(len(nodes)))
    while (
        ready := next((number for number in left if available.issuperset(nodes[number][0])), None)
    ) is not None:
        order.append(ready)
        left.remove(ready)
        available.update(nodes[ready][1])
    missing = {tensor for number in left for tensor in nodes[number][0]} - available - producers.keys()
    return Dag(producers, clash, tuple(order), tuple(left), frozenset(available), tuple(sorted(missing)))
