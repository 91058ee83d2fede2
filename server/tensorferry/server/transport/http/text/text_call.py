"""A call of a text endpoint, between its dialect and the model that answers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.json_values import Fields, checked_boolean, quoted

# The most texts of a call, as OpenAI has it.
MAX_TEXTS = 2048


class TextResult(NamedTuple):
    """What a model gave for the texts of a call, in their order.

    `values` are FP32: vectors, vectors of tokens, scores or scores of classes, one row a text. Those of the task "tokenize" are
    lists in JSON, one a text. `counts` has the number of tokens of each text; it is empty if the model does not say. `labels`
    are the names of classes. `normalized` is true if the model scales its vectors to length 1.
    """

    model: str
    values: npt.NDArray[Any]
    counts: Sequence[int]
    labels: Sequence[str]
    normalized: bool

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts; 0 if the model does not say."""
        return sum(self.counts)


class TextCall(NamedTuple):
    """Texts for a model with a task.

    `columns` has the texts of each input: one, or two for pairs. `answer` returns the JSON of the response. `output` is the
    output that is wanted, "" for that of the task.
    """

    task: str
    columns: tuple[Sequence[str], ...]
    answer: Callable[[TextResult], bytes]
    output: str = ""


TextEndpoint = Callable[[Fields], TextCall]
# One for all models, or several by the task of the model.
TextEndpoints = TextEndpoint | Mapping[str, TextEndpoint]


def names_of(model: pb.ModelMetadataResponse) -> Sequence[str]:
    """Return the names by which clients of the text endpoints know a model."""
    return (model.name, *json.loads(model.properties.get("served_as", "[]")))


def texts_in(fields: Fields, name: str) -> Sequence[str]:
    """Return the texts in a field, which has one or a list."""
    given: Any = fields.get(name)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list):
        raise HttpError(400, f"{name!r} must be a string or a list of strings")
    check_texts(texts, name)
    return texts


def check_texts(texts: Sequence[Any], name: str) -> None:
    """Raise HttpError unless these are between one and `MAX_TEXTS` strings."""
    if not 0 < len(texts) <= MAX_TEXTS:
        raise HttpError(400, f"{name!r} has {len(texts)} texts; it must have 1 to {MAX_TEXTS}")
    if set(map(type, texts)) != {str}:
        raise HttpError(400, f"{name!r} must be a string or a list of strings")


def flag_in(fields: Fields, name: str) -> bool:
    """Return a boolean field; false without it."""
    value = fields.get(name)
    return value is not None and checked_boolean(name, value)


def number_in(fields: Fields, name: str) -> int | None:
    """Return a field with an integer of at least 1; None if it is not given."""
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise HttpError(400, f"{name!r} is {quoted(value)}; it must be an integer of at least 1")
    return value


def check_values(values: npt.NDArray[np.float32], labels: Sequence[str]) -> None:
    """Raise HttpError for values of a model that are not finite, which JSON cannot have, or that do not fit the labels."""
    if not np.isfinite(values).all():
        raise HttpError(500, "the model gave a number that is not finite")
    if labels and values.shape[1] != len(labels):
        raise HttpError(500, f"the model gave {values.shape[1]} classes, but has {len(labels)} labels")


def shortened(
    vectors: npt.NDArray[np.float32], dimensions: int | None, normalize: bool | None = None
) -> npt.NDArray[np.float32]:
    """Return the first `dimensions` numbers of each vector, scaled to length 1 if `normalize`; by default, if they are cut."""
    size = vectors.shape[1]
    if dimensions is not None and dimensions > size:
        raise HttpError(400, f"'dimensions' is {dimensions}, but the model's vectors have {size} numbers")
    cut = vectors[:, :dimensions]
    if not (cut.shape[1] < size if normalize is None else normalize):
        return cut
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    scaled: npt.NDArray[np.float32] = cut / np.maximum(lengths, np.float32(1e-12))
    return scaled


def vectors_as_json(vectors: npt.NDArray[np.float32]) -> list[str]:
    """Return each vector, which is finite, as a JSON list. Nine digits give back the same FP32 number."""
    form = "[" + ",".join(["%.9g"] * vectors.shape[1]) + "]"
    return [form % tuple(vector) for vector in vectors.tolist()]
