"""The batching proof: rows that ride together must get what they get alone.

Random rows are run alone, then together in another order and with other neighbours. A model
that mixes its rows (a softmax or a mean over axis 0, say), or whose outputs do not follow the
batch axis, is found out here and served unbatched, rather than giving callers each other's
numbers. What a model does with a string may depend on which one it is, and random ones tell
nothing of that: rows of the words that are in its own file are tried as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.protos.tensors import Datatype
from tensorferry.server.signature import Signature, TensorSpec

Array = npt.NDArray[Any]
Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]

_ROWS = 5
# Sizes tried for dimensions that vary besides the batch axis: a model may need a least size,
# or a multiple of one.
_SIZES = (4, 16, 64, 224, 1)
# Samples tried until the rows of every input differ.
_DRAWS = 16
# Allowed difference, relative to the greatest magnitude of the output: room for another order
# of summation, not for another answer.
_TOLERANCE = {"FP16": 1e-2, "BF16": 5e-2, "FP32": 1e-4, "FP64": 1e-9}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether batching is safe, why not, and the size that the other varying dimensions were given.

    `size` is None when the model ran with none of the sizes tried.
    """

    batchable: bool
    reason: str
    size: int | None


def sample(
    signature: Signature, rows: int, size: int, seed: int = 0, sizes: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """Random inputs: `rows` rows, and `size` for every other dimension that varies, but for those named in `sizes`.

    Floats are standard normal, integers and strings 0 or 1: values that indices, masks and
    categories all admit.
    """
    generator = np.random.default_rng(seed)
    return {spec.name: _random(spec, rows, size, sizes or {}, generator) for spec in signature.inputs}


def _random(
    spec: TensorSpec, rows: int, size: int, sizes: Mapping[str, int], generator: np.random.Generator
) -> Array:
    shape = tuple(dim if isinstance(dim, int) else sizes.get(dim, size) for dim in spec.dims)
    if spec.dims and not isinstance(spec.dims[0], int):
        shape = (rows, *shape[1:])
    return random_array(spec.datatype, shape, generator)


def random_array(datatype: Datatype, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Random values of a datatype, as `sample` has them."""
    name, storage = datatype.name, datatype.storage
    if name == "BYTES":
        return generator.integers(0, 2, shape).astype(str).astype(object)
    if name == "BF16":
        bits = generator.standard_normal(shape).astype("<f4").view("<u4") >> 16
        return np.asarray(bits, "<u2")  # of a scalar, what operators return is no array
    if storage.kind == "f":
        return generator.standard_normal(shape).astype(storage)
    if name == "UINT8":
        return generator.integers(0, 256, shape).astype(storage)
    return generator.integers(0, 2, shape).astype(storage)


def working_size(signature: Signature, run: Run) -> tuple[int | None, str]:
    """A size of the varying dimensions with which the model runs, or None and why it does not."""
    reason = ""
    for size in _SIZES if varies(signature) else _SIZES[:1]:
        try:
            run(sample(signature, 1, size))
        except Exception as error:
            reason = reason or str(error)
        else:
            return size, ""
    return None, reason


def varies(signature: Signature) -> bool:
    """Whether an input has a dimension that varies besides the batch axis."""
    return any(not isinstance(dim, int) for spec in signature.inputs for dim in spec.dims[1:])


def prove(
    signature: Signature, run: Run, words: Sequence[Sequence[str]] = (), precision: float = 0.0
) -> Verdict:
    """Runs the proof on a model whose signature has a batch axis; never raises.

    `words` are lists of strings that the model knows, `precision` is that to which it is computed, where
    its outputs do not show it.
    """
    size, reason = working_size(signature, run)
    if size is None:
        return Verdict(False, f"it does not run on random input ({reason}), so nothing can be proved", None)
    try:
        inputs = _differing(signature, size)
        verdict = _compare(signature, run, size, precision, inputs, _alone(run, inputs))
        if any(spec.datatype.name == "BYTES" for spec in signature.inputs):
            for known in words:
                if not verdict.batchable:
                    break
                spoken = _spoken(signature, inputs, known)
                try:
                    alone = _alone(run, spoken)
                except Exception:
                    # Not all that is in the file is for this input.
                    continue
                verdict = _compare(signature, run, size, precision, spoken, alone)
    except Exception as error:
        return Verdict(False, f"it runs one row, but not several together ({error})", size)
    return verdict


def _spoken(signature: Signature, inputs: Mapping[str, Array], words: Sequence[str]) -> dict[str, Array]:
    """The inputs, but that every other string is one of the words, each in turn."""
    spoken = dict(inputs)
    for spec in signature.inputs:
        if spec.datatype.name == "BYTES":
            array = inputs[spec.name].copy()
            flat = array.reshape(-1)
            for at in range(0, len(flat), 2):
                flat[at] = words[at // 2 % len(words)]
            spoken[spec.name] = array
    return spoken


def _alone(run: Run, inputs: Mapping[str, Array]) -> list[Mapping[str, Array]]:
    return [run(_take(inputs, [row])) for row in range(_ROWS)]


def _compare(
    signature: Signature,
    run: Run,
    size: int,
    precision: float,
    inputs: Mapping[str, Array],
    alone: Sequence[Mapping[str, Array]],
) -> Verdict:
    again = run(_take(inputs, [0]))
    for spec in signature.outputs:
        difference = difference_of(spec, alone[0][spec.name], again[spec.name], precision)
        if difference:
            return Verdict(
                False, f"output {spec.name!r} of one row differs from run to run: {difference}", size
            )
    for rows in ([3, 0, 4, 2, 1], [1, 3], [4, 2, 0]):
        together = run(_take(inputs, rows))
        for spec in signature.outputs:
            output = together[spec.name]
            if output.shape[:1] != (len(rows),):
                reason = f"output {spec.name!r} has shape {list(output.shape)} for {len(rows)} rows"
                return Verdict(False, f"{reason}: it does not follow the batch axis", size)
            for at, row in enumerate(rows):
                difference = difference_of(spec, alone[row][spec.name], output[at : at + 1], precision)
                if difference:
                    reason = f"output {spec.name!r} of a row changes with its neighbours: {difference}"
                    return Verdict(False, reason, size)
    return Verdict(True, "rows run together equal rows run alone", size)


def _differing(signature: Signature, size: int) -> dict[str, Array]:
    """Random rows that are not all alike in any input, where it has room to differ.

    Five bits are alike once in sixteen times; a model that must have them so (they are axes, say)
    would then look as if its rows were independent.
    """
    inputs = sample(signature, _ROWS, size)
    for seed in range(1, _DRAWS):
        alike = [name for name, array in inputs.items() if np.array_equal(array[1:], array[:-1])]
        if not alike:
            break
        drawn = sample(signature, _ROWS, size, seed)
        inputs.update({name: drawn[name] for name in alike})
    return inputs


def _take(inputs: Mapping[str, Array], rows: list[int]) -> dict[str, Array]:
    return {name: np.ascontiguousarray(array[rows]) for name, array in inputs.items()}


def difference_of(spec: TensorSpec, expected: Array, got: Array, precision: float = 0.0) -> str:
    """In what `got` is another answer than `expected`; "" when it is the same but for rounding.

    Rounding is that of the datatype, or, if that is coarser, to `precision`.
    """
    if expected.shape != got.shape:
        return f"shape {list(got.shape)} instead of {list(expected.shape)}"
    tolerance = _TOLERANCE.get(spec.datatype.name)
    if tolerance is None:
        wrong = int(np.count_nonzero(expected != got))
        return f"{wrong} of {expected.size} values are others" if wrong else ""
    tolerance = max(tolerance, precision)
    a, b = (as_float64(array, spec) for array in (expected, got))
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinities or NaNs stand elsewhere"
    if not finite.any():
        return ""
    scale = max(float(np.abs(a[finite]).max()), 1e-6)
    worst = float(np.abs(a[finite] - b[finite]).max())
    return f"by {worst:.3g}, its values reach {scale:.3g}" if worst > tolerance * scale else ""


def as_float64(array: Array, spec: TensorSpec) -> Array:
    """The numbers in a tensor of floats, BF16 among them."""
    if spec.datatype.name == "BF16":
        return (array.astype("<u4") << 16).view("<f4").astype("<f8")
    return array.astype("<f8")
