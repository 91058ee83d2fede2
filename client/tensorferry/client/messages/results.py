"""Results: outputs by name, as classes, and as tables."""

from __future__ import annotations

import importlib
import itertools
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.arguments import integer
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

Parameter = bool | int | float | str
ArrayT = TypeVar("ArrayT")

# Limits of the repr of a result.
_SHOWN = 20
_short = reprlib.Repr()
_short.maxdict = _SHOWN
_short.maxstring = _short.maxother = 120


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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Answer(Mapping[str, ArrayT]):
    """A mapping from output name to array, and the other fields of an answer."""

    model_name: str
    model_version: str
    id: str
    parameters: Mapping[str, Parameter]
    outputs: Mapping[str, ArrayT]

    # Arrays have no single answer to "are they equal?", which the comparison of mappings needs.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> ArrayT:
        return self.outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class InferenceResult(Answer[Array]):
    """One answer: a mapping from output name to numpy array, in the server's order.

    Numbers and bools have their numpy dtype, BF16 is `ml_dtypes.bfloat16`, and BYTES is an object
    array of `bytes`. Arrays of a fixed width are read-only views of the received message; copy
    an array to write to it. `id` is the request's id, or "".

    >>> result = client.infer("digits", {"image": np.zeros((1, 8, 8), np.uint8)}, request_id="a")
    >>> sorted(result), result.id, result.model_name
    (['label', 'probabilities'], 'a', 'digits')
    """

    def classes(self, name: str) -> list[list[ClassScore]]:
        """Return the classes of an output that was requested with `Classification`, the highest first.

        There is one list for each row; a model without batch axis has one row. Raises InvalidInput
        for an output without classes.

        >>> wanted = {"probabilities": Classification(2)}
        >>> result = client.infer("digits", {"image": np.zeros((1, 8, 8), np.uint8)}, outputs=wanted)
        >>> [[best, second]] = result.classes("probabilities")
        >>> best.score >= second.score, 0 <= best.index < 10
        (True, True)
        """
        return _scores(name, self.outputs[name])

    def to_lists(self, *, text: bool = True) -> dict[str, Any]:
        """Return each output as nested lists of Python values.

        BYTES become str, or stay bytes if `text` is false. Raises InvalidInput for bytes that are
        not UTF-8.

        >>> result = client.infer("digits", {"image": np.zeros((1, 8, 8), np.uint8)})
        >>> len(result.to_lists()["probabilities"][0])
        10
        """
        return {name: _plain(name, array, text).tolist() for name, array in self.outputs.items()}

    def to_pandas(self, *, text: bool = True) -> Any:
        """Return the outputs as a pandas DataFrame with a row for each row of the request.

        An output with one axis is a column, and one with two axes the columns "NAME_0", "NAME_1"
        and so on. An output with more axes is a column of nested lists. `text` is as in `to_lists`.
        Raises ImportError without pandas.

        >>> result = client.infer("digits", {"image": np.zeros((2, 8, 8), np.uint8)})
        >>> list(result.to_pandas().columns)[-2:]
        ['probabilities_8', 'probabilities_9']
        """
        pandas = _library("pandas", "to_pandas()")
        return pandas.DataFrame(_columns(self.outputs, text))

    def to_arrow(self, *, text: bool = True) -> Any:
        """Return the outputs as a pyarrow Table with the columns of `to_pandas`.

        Raises ImportError without pyarrow.

        >>> result = client.infer("digits", {"image": np.zeros((2, 8, 8), np.uint8)})
        >>> result.to_arrow().num_rows
        2
        """
        pyarrow = _library("pyarrow", "to_arrow()")
        return pyarrow.table(_columns(self.outputs, text))

    def __repr__(self) -> str:
        shown = [
            f"{_short.repr(name)}: {tensors.datatype_of(array)} {list(array.shape)}"
            for name, array in itertools.islice(self.items(), _SHOWN)
        ]
        if len(self) > _SHOWN:
            shown.append(f"and {len(self) - _SHOWN} more")
        head = f"InferenceResult(model_name={_short.repr(self.model_name)}, model_version={_short.repr(self.model_version)}"
        return (
            f"{head}, id={_short.repr(self.id)}, outputs={{{', '.join(shown)}}},"
            f" parameters={_short.repr(dict(self.parameters))})"
        )


def _scores(name: str, array: Array) -> list[list[ClassScore]]:
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


def _columns(outputs: Mapping[str, Array], text: bool) -> dict[str, Any]:
    """Return the columns of the outputs.

    An output with one axis is a column. One with two axes is a column for each place of the second
    axis: "NAME_0", "NAME_1" and so on, or "NAME" for a single place. One with more is a column of
    nested lists.
    """
    found: dict[str, Any] = {}
    sizes = {name: array.shape[0] if array.ndim else None for name, array in outputs.items()}
    if len(set(sizes.values())) > 1 or None in sizes.values():
        received = ", ".join(f"{name!r} {list(array.shape)}" for name, array in outputs.items())
        raise InvalidInput(
            "a table of the result",
            "outputs with the same number of rows",
            received,
            "choose some of them with outputs=",
        )
    for name, array in outputs.items():
        plain = _plain(name, array, text)
        parts: dict[str, Any] = {name: plain}
        if plain.ndim == 2 and plain.shape[1] == 1:
            parts = {name: plain[:, 0]}
        elif plain.ndim == 2:
            parts = {f"{name}_{place}": plain[:, place] for place in range(plain.shape[1])}
        elif plain.ndim > 2:
            parts = {name: plain.tolist()}
        for column, values in parts.items():
            if column in found:
                raise InvalidInput(
                    "a table of the result",
                    "columns with different names",
                    f"{column!r} twice",
                    "choose some of the outputs with outputs=",
                )
            found[column] = values
    return found


def _library(name: str, method: str) -> Any:
    """Return an optional library; raise ImportError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{method} needs {name}, which is not installed: pip install {name}") from None


def _plain(name: str, array: Array, text: bool) -> Array:
    if array.dtype != object:
        # BF16 of ml_dtypes is no dtype of numpy's own; FP32 holds all its values.
        return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    if not text:
        return array
    decoded = np.empty(array.shape, object)
    for place, value in np.ndenumerate(array):
        try:
            decoded[place] = value.decode()
        except UnicodeDecodeError:
            raise InvalidInput(
                f"output {name!r} as text",
                "UTF-8",
                f"{value[:40]!r} at {list(place)}",
                "use text=False for bytes",
            ) from None
    return decoded
