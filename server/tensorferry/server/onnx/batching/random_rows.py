"""Random rows with values that are valid for indices, masks and categories, and strings from the model's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tensorferry.server.onnx.batching.row_kinds import Row
from tensorferry.server.runtime.checks.sampling import Array, random_inputs
from tensorferry.server.signature import Signature

RANDOM_ROWS = 5
# Most draws until the rows differ in every input.
_DRAWS = 16


def rows_of(signature: Signature, inputs: Mapping[str, Array]) -> list[Row]:
    """Return the rows of a batch as batches of one row."""
    return [
        {
            spec.name: np.ascontiguousarray(inputs[spec.name][[row]])
            if spec.has_row_axis
            else inputs[spec.name]
            for spec in signature.inputs
        }
        for row in range(RANDOM_ROWS)
    ]


def with_vocabulary(
    signature: Signature, inputs: Mapping[str, Array], vocabulary: Sequence[str]
) -> dict[str, Array]:
    """Return the inputs with every second string replaced by one of the vocabulary, in turn."""
    filled = dict(inputs)
    for spec in signature.inputs:
        if spec.datatype.name == "BYTES":
            array = inputs[spec.name].copy()
            flat = array.reshape(-1)
            for at in range(0, len(flat), 2):
                flat[at] = spec.element(vocabulary[at // 2 % len(vocabulary)])
            filled[spec.name] = array
    return filled


def distinct_rows(signature: Signature, size: int, seed: int = 0) -> dict[str, Array]:
    """Return random rows that are not all equal in any input, if the input can differ.

    Five random bits are equal once in sixteen draws. A model that requires them to be equal, for instance because they
    are axes, would then seem to have independent rows.
    """
    first = seed * _DRAWS
    inputs = random_inputs(signature, RANDOM_ROWS, size, first)
    for other in range(first + 1, first + _DRAWS):
        rows = {spec.name: inputs[spec.name] for spec in signature.inputs if spec.has_row_axis}
        alike = [name for name, array in rows.items() if np.array_equal(array[1:], array[:-1])]
        if not alike:
            break
        drawn = random_inputs(signature, RANDOM_ROWS, size, other)
        inputs.update({name: drawn[name] for name in alike})
    return inputs
