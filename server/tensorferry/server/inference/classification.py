"""The classification extension: instead of an output, the classes with its highest values, as strings."""

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

# The parameter of a requested output that asks for classes, and how many.
CLASSIFICATION = "classification"

BYTES = DATATYPES["BYTES"]

# Triton's list: others have no values that it compares.
_COMPARED = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64")
# To rank more would keep the thread that answers everyone for long.
_MOST_ELEMENTS = 1_000_000


def class_count(output: pb.ModelInferRequest.InferRequestedOutputTensor, kind: Datatype) -> int:
    """How many classes are wanted of an output of this datatype; 0 where its values are."""
    if CLASSIFICATION not in output.parameters:
        return 0
    count: int = parameter_value(output.parameters[CLASSIFICATION], CLASSIFICATION, "int64_param")
    if count <= 0:
        raise InvalidRequestError(
            f"invalid value for {CLASSIFICATION!r} parameter of output {output.name!r}, expected the number of "
            f"classes, at least 1, got {count}"
        )
    if kind.name not in _COMPARED:
        raise InvalidRequestError(
            f"class result not available for output due to unsupported type {kind.name!r}: output {output.name!r}; "
            f"ask for its values, or for classes of {', '.join(_COMPARED)}"
        )
    return count


@dataclass(frozen=True, slots=True)
class Classifier:
    """Turns outputs of a model into classes. `batched` says that axis 0 counts rows; `labels` are by output.

    A class's label is the one at its place, if it has one that is not empty.
    """

    batched: bool = False
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def classes(self, name: str, array: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
        """The highest values of each row, the highest first, as bytes `value:index` or `value:index:label`.

        Of equal ones the first is higher; those that are not numbers are lowest. Of a model that is
        not batched the output is one row, whatever its shape, and the result has one dimension.
        """
        by_row = self.batched and array.ndim > 0
        rows = array.shape[0] if by_row else 1
        width = array.size // rows if rows else int(np.prod(array.shape[1:]))
        if width > _MOST_ELEMENTS:
            raise InvalidRequestError(
                f"classification output tensor too large: a row of output {name!r} has {width} elements, at most "
                f"{_MOST_ELEMENTS} are ranked; ask for its values"
            )
        count = min(count, width)
        labels = self.labels.get(name, ())
        texts = [text for row in array.reshape(rows, width) for text in _texts(row, count, labels)]
        found = np.empty(len(texts), dtype=object)
        found[:] = texts
        return found.reshape((rows, count) if by_row else (count,))


# Of a model without labels that is not batched.
PLAIN = Classifier()


def _texts(row: npt.NDArray[Any], count: int, labels: Sequence[str]) -> list[bytes]:
    texts = []
    for index in _highest(row, count):
        value = row[index]
        # As C++ writes it: floats with six digits behind the point.
        text = f"{value:f}:{index}" if row.dtype.kind == "f" else f"{value}:{index}"
        if index < len(labels) and labels[index]:
            text += f":{labels[index]}"
        texts.append(text.encode(errors="surrogateescape"))
    return texts


def _highest(row: npt.NDArray[Any], count: int) -> list[int]:
    # Ascending in these is descending in the row; what is not a number stays behind all others, and an
    # integer has a complement where its negative may not be one.
    keys = -row if row.dtype.kind == "f" else ~row
    if 0 < count < len(row) // 4:
        last = np.partition(keys, count - 1)[count - 1]
        if last == last:
            # To sort those that come into question is enough.
            among = np.flatnonzero(keys <= last)
            return [int(index) for index in among[np.argsort(keys[among], kind="stable")[:count]]]
    return [int(index) for index in np.argsort(keys, kind="stable")[:count]]
