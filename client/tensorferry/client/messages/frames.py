"""Inputs given as columns: pandas DataFrames, pyarrow tables, and dicts of lists.

Neither library is a dependency. A value of one can only come from a program that imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.arguments import quoted
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata, check_names, subject_of
from tensorferry.protos.tensors import Array


class Frame(dict[str, Array]):
    """Columns by name, in order. Each is an array with one axis."""

    def __init__(self, columns: Iterable[tuple[object, Array]]) -> None:
        super().__init__()
        for label, values in columns:
            name = str(label)
            if name in self:
                raise InvalidInput(
                    "the data frame", "columns with different names", f"{name!r} twice", "rename one of them"
                )
            self[name] = values


def frame_of(inputs: Any) -> Any:
    """Return the columns of a pandas DataFrame or a pyarrow table; any other value unchanged."""
    if isinstance(inputs, Mapping):
        return inputs
    if isinstance(inputs, _imported("pandas", "DataFrame")):
        return Frame(
            (label, _pandas_values(inputs.iloc[:, place])) for place, label in enumerate(inputs.columns)
        )
    if isinstance(inputs, _imported("pyarrow", "RecordBatch")):
        inputs = sys.modules["pyarrow"].Table.from_batches([inputs])
    if isinstance(inputs, _imported("pyarrow", "Table")):
        return Frame(
            (label, inputs.column(place).to_numpy()) for place, label in enumerate(inputs.column_names)
        )
    return inputs


def _imported(library: str, name: str) -> Any:
    """Return a class of a library; () if the program has not imported it, or another thread imports it now."""
    return getattr(sys.modules.get(library), name, ())


def columns_for(inputs: Mapping[str, object], model: ModelMetadata) -> Mapping[str, object]:
    """Return the columns of a dict of lists for a model with one input of features; other dicts as they are.

    Only a dict of two columns or more counts as columns: a single unknown name is a wrong name.
    """
    if len(model.inputs) != 1 or len(inputs) < 2 or model.inputs[0].name in inputs:
        return inputs
    arrays = {
        # Objects, because numpy makes strings of numbers beside strings, and rounds integers beside floats.
        name: np.asarray(values, object)
        for name, values in inputs.items()
        if isinstance(values, (list, tuple))
    }
    if len(arrays) < len(inputs) or any(array.ndim != 1 for array in arrays.values()):
        return inputs
    return Frame(arrays.items())


def pieces(frame: Frame, model: ModelMetadata) -> Iterator[tuple[TensorMetadata, dict[str, Array]]]:
    """Yield each input of the model with its columns; raise InvalidInput if the columns do not fit.

    A model with one input of two axes takes all columns, in order. Any other model takes a column
    for each input, by name.
    """
    if len(model.inputs) == 1 and len(model.inputs[0].shape) == 2:
        [tensor] = model.inputs
        expected = tensor.shape[1]
        if expected not in (-1, len(frame)):
            raise InvalidInput(
                subject_of(tensor, model.name),
                f"{expected} columns, one for each feature, in order",
                f"{len(frame)}: {quoted(frame)}",
                "select the columns with which the model was trained",
            )
        yield tensor, frame
        return
    check_names(model, "columns", frame)
    for tensor in model.inputs:
        if tensor.name not in frame:
            continue
        if len(tensor.shape) not in (1, 2) or (len(tensor.shape) == 2 and tensor.shape[1] not in (-1, 1)):
            raise InvalidInput(
                subject_of(tensor, model.name),
                str(tensor),
                f"the column {tensor.name!r}, with one value for each row",
                "give the inputs as a dict of arrays",
            )
        yield tensor, {tensor.name: frame[tensor.name]}


def check_strings(column: Array, tensor: TensorMetadata, subject: str) -> Array:
    """Return a column of str or bytes as objects; raise InvalidInput with the row of another value."""
    column = column.astype(object)
    for row, value in enumerate(column):
        if not isinstance(value, (str, bytes)):
            received = f"{value!r} in row {row}"
            raise InvalidInput(
                subject, f"{tensor.datatype}: str or bytes", received, "convert or fill it first"
            )
    return column


def _pandas_values(series: Any) -> Array:
    values: Array = series.to_numpy()
    # Before version 2.2, pandas gives objects also for its own number types without missing values.
    if values.dtype == object and getattr(series.dtype, "kind", "O") in "iuf" and series.hasnans:
        # Missing values become NaN.
        values = series.to_numpy(dtype="float64", na_value=np.nan)
    return values
