"""The classification extension: the classes with an output's highest values, as strings, in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import DATATYPES, Datatype
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.wire.parameters import parameter_value

# The parameter of a requested output with the number of classes asked for.
CLASSIFICATION = "classification"

BYTES = DATATYPES["BYTES"]

# The datatypes that Triton ranks.
_RANKED = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64")
# Ranking more would delay other responses, because one thread sends them all.
_MAX_ROW_ELEMENTS = 1_000_000


def class_count(output: pb.ModelInferRequest.InferRequestedOutputTensor, kind: Datatype) -> int:
    """Return the number of classes asked for of an output of this datatype; 0 if its values are wanted."""
    if CLASSIFICATION not in output.parameters:
        return 0
    count: int = parameter_value(output.parameters[CLASSIFICATION], CLASSIFICATION, "int64_param")
    if count <= 0:
        raise InvalidRequestError(
            f"invalid value for {CLASSIFICATION!r} parameter of output {output.name!r}, expected the number of "
            f"classes, at least 1, got {count}"
        )
    if kind.name not in _RANKED:
        raise InvalidRequestError(
            f"class result not available for output due to unsupported type {kind.name!r}: output {output.name!r}; "
            f"ask for its values, or for classes of {', '.join(_RANKED)}"
        )
    return count


@dataclass(frozen=True, slots=True)
class Classifier:
    """Turns a model's outputs into classes.

    `batched` says that axis 0 counts rows. `labels` has, by output, the label of each class; "" for none.
    """

    batched: bool = False
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def classes(self, name: str, array: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
        """Return the highest values of each row, highest first, as `value:index` or `value:index:label`.

        Equal values keep their order; NaN comes last. An output of a model that is not batched is one row of any shape,
        and its result has one dimension.
        """
        by_row = self.batched and array.ndim > 0
        rows = array.shape[0] if by_row else 1
        width = array.size // rows if rows else int(np.prod(array.shape[1:]))
        if width > _MAX_ROW_ELEMENTS:
            raise InvalidRequestError(
                f"classification output tensor too large: a row of output {name!r} has {width} elements, at most "
                f"{_MAX_ROW_ELEMENTS} are ranked; ask for its values"
            )
        count = min(count, width)
        labels = self.labels.get(name, ())
        texts = [text for row in array.reshape(rows, width) for text in _texts(row, count, labels)]
        classes = np.empty(len(texts), dtype=object)
        classes[:] = texts
        return classes.reshape((rows, count) if by_row else (count,))


# For a model without labels that is not batched.
NO_LABELS = Classifier()


def _texts(row: npt.NDArray[Any], count: int, labels: Sequence[str]) -> list[bytes]:
    texts = []
    for index in _highest(row, count):
        value = row[index]
        # Six digits behind the point, as C++ writes floats.
        text = f"{value:f}:{index}" if row.dtype.kind == "f" else f"{value}:{index}"
        if index < len(labels) and labels[index]:
            text += f":{labels[index]}"
        texts.append(text.encode(errors="surrogateescape"))
    return texts


def _highest(row: npt.NDArray[Any], count: int) -> list[int]:
    # Ascending keys mean descending values, with NaN last. Integers are complemented, because the negative of the
    # smallest one overflows.
    keys = -row if row.dtype.kind == "f" else ~row
    if 0 < count < len(row) // 4:
        last = np.partition(keys, count - 1)[count - 1]
        if not np.isnan(last):
            candidates = np.flatnonzero(keys <= last)
            return [int(index) for index in candidates[np.argsort(keys[candidates], kind="stable")[:count]]]
    return [int(index) for index in np.argsort(keys, kind="stable")[:count]]
