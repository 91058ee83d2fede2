"""Classification extension: the classes with the highest values of an output, in place of its values."""

from __future__ import annotations

from dataclasses import dataclass

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.arguments import integer
from tensorferry.protos.tensors import Array


@dataclass(frozen=True, slots=True)
class Classification:
    """Request for the `count` classes with the highest values of an output, in place of its values.

    `InferenceResult.classes` returns them.

    >>> result = client.infer(
    ...     "digits",
    ...     {"image": np.zeros((1, 8, 8), np.uint8)},
    ...     outputs={"probabilities": Classification(3), "label": None},
    ... )
    >>> len(result.classes("probabilities")[0])
    3
    """

    count: int

    def __post_init__(self) -> None:
        integer("Classification", self.count, 1, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class ClassScore:
    """One class of a row: its value, its index, and its label, "" without one.

    >>> ClassScore(0.75, 3, "three").label
    'three'
    """

    score: float
    index: int
    label: str


def scores(name: str, array: Array) -> list[list[ClassScore]]:
    """Return the classes of each row; an output of a model without batch axis is one row."""
    if array.dtype != object or array.ndim not in (1, 2):
        raise _no_classes(name, f"{array.dtype} {list(array.shape)}")
    rows = array if array.ndim == 2 else array[None]
    return [[_score(name, text) for text in row] for row in rows]


def _score(name: str, text: bytes) -> ClassScore:
    try:
        score, index, *label = text.decode(errors="surrogateescape").split(":", 2)
        return ClassScore(float(score), int(index), "".join(label))
    except ValueError:
        raise _no_classes(name, f"the element {text[:80]!r}") from None


def _no_classes(name: str, received: str) -> InvalidInput:
    change = f"ask for them with outputs={{{name!r}: Classification(3)}}"
    return InvalidInput(f"output {name!r}", "classes, such as b'0.5:7:seven'", received, change)
