"""The check of a function at load: at most four calls try its declaration, compare rows, and measure times.

Two different rows run alone and together, and each must give the same outputs. If they differ, one of them runs alone once
more, because random outputs always differ. If they do not, the largest batch runs, unless it would take long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorferry.protos.tensors import from_numbers
from tensorferry.server.errors import NotReadyError, StartError, truncate
from tensorferry.server.observability.logs.log_format import EXCEPTION
from tensorferry.server.onnx.batching.row_kinds import Row, batch_of_rows, distinct_rows, rows_of
from tensorferry.server.processes.functions.errors import FunctionRaised
from tensorferry.server.python.functions.failure import Failure, describe
from tensorferry.server.python.models.instance import BatchCall
from tensorferry.server.python.models.outputs import WrongOutputs, fits
from tensorferry.server.runtime.checks.sampling import (
    Array,
    array_of_floats,
    as_float64,
    describe_difference,
    varies,
)
from tensorferry.server.runtime.host_memory import check_fits
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.serving import FunctionModel, calls_through

_log = logging.getLogger("tensorferry.server")

_MOST_CALLS = 4
# Sizes tried for varying dimensions other than the axis of rows.
_SIZES = (4, 64)
# The largest batch runs if it is expected to take at most this time.
_CHEAP_SECONDS = 1.0
# A greatest value, a sum or a scale of the whole batch shows only if rows differ in magnitude.
_SMALL, _LARGE = 0.1, 1e3
# Most rows that are compared at each end of a batch.
_COMPARED_ROWS = 64
# Values of an output in a message.
_SHOWN_VALUES, _SHOWN_CHARACTERS = 4, 80


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """What the calls at load have shown.

    `compared` is whether rows that run together equal rows that run alone. `mixing` is why requests should share no batch;
    empty if nothing speaks against it. `seconds` has times by rows; a batch counts at most as long as its rows alone.
    """

    compared: bool = False
    mixing: str = ""
    seconds: Mapping[int, float] = field(default_factory=dict)


def check_at_load(
    declared: FunctionModel,
    signature: Signature,
    call: BatchCall,
    most: int,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadCheck:
    """Check a function whose batches have at most `most` rows; 0 if requests have no rows. Log what was not checked.

    StartError if it writes to its inputs, returns something else than it declares, or raises on its own example.
    """
    calls = _Calls(declared.name, call, clock, compares=most > 1)
    if not declared.check:
        why = "TritonPythonModel" if declared.takes_requests else "check=False"
        calls.log_unchecked(logging.INFO, f"is not called at load ({why})", "")
        return LoadCheck()
    try:
        return _checked(declared, signature, calls, most)
    except _CallsModel as called:
        why = f"calls model {called}, so it is not tried at load"
        calls.log_unchecked(logging.INFO, why, "")
        return LoadCheck()


def _checked(declared: FunctionModel, signature: Signature, calls: _Calls, most: int) -> LoadCheck:
    sample: Sequence[Row] = ()
    outputs = None
    for sample in _samples(declared, signature, most):
        outputs = calls.run(sample[0], 1)
        if outputs is not None:
            break
    if outputs is None:
        if declared.example is not None:
            raise StartError(f"model {declared.name!r} raised on its own example:\n{calls.failure.details}")
        why = f"raised {calls.failure.reason} in its trial run on random input"
        calls.log_unchecked(logging.WARNING, why, "give @model(example=...)", calls.failure.details)
        return LoadCheck()
    if most < 2:
        calls.run(sample[0], 1)
        return LoadCheck(seconds=calls.times())
    return _compared(signature, calls, sample, outputs, most)


def _compared(
    signature: Signature, calls: _Calls, sample: Sequence[Row], first: Mapping[str, Any], most: int
) -> LoadCheck:
    """Compare rows of a sample; `first` has the outputs of its first row."""
    rows, alone = [sample[0]], [first]
    for other in sample[1:]:
        differs = _differ(sample[0], other)
        if len(rows) == 1 and differs and calls.left > 1 and (outputs := calls.run(other, 1)) is not None:
            # Before the small row, because rows are accumulated from the first one on, and a large sum hides a small number.
            rows.insert(0, other)
            alone.insert(0, outputs)
    refusal = calls.failure.reason
    together = calls.run(batch_of_rows(signature, [rows[0], rows[-1]]), 2)
    if together is None:
        return LoadCheck(mixing=f"it runs one row, but not two together: {calls.failure.reason}")
    if len(rows) == 1:
        why = f"raised {refusal} on a second row" if refusal else "has an example of equal rows"
        calls.log_unchecked(logging.WARNING, why, "give @model(example=...) with two different rows")
        return LoadCheck(seconds=calls.times())
    mixing, at = _difference(signature, alone, together, 2)
    if mixing:
        again = calls.run(rows[at], 1) if calls.left else None
        if again is not None and _difference(signature, [alone[at]], again, 1)[0]:
            mixing = "the same row gives different outputs from run to run, so rows cannot be compared"
    elif most > 2 and calls.left and calls.seconds[2] / 2 * most <= _CHEAP_SECONDS:
        mixing = _mixing_in_largest(signature, calls, rows, alone, most)
    return LoadCheck(compared=not mixing, mixing=mixing, seconds=calls.times())


def _mixing_in_largest(
    signature: Signature,
    calls: _Calls,
    rows: Sequence[Row],
    alone: Sequence[Mapping[str, Any]],
    most: int,
) -> str:
    row_bytes = sum(np.asarray(array).nbytes for array in (*rows[0].values(), *alone[0].values()))
    what = f"model {calls.name!r}: input and output of a batch of {most} rows"
    check_fits(what, row_bytes * most, f"lower max_batch_size, which is {most}")
    pair = batch_of_rows(signature, rows)
    largest = calls.run(
        {name: np.resize(array, (most, *array.shape[1:])) for name, array in pair.items()}, most
    )
    if largest is not None:
        return _difference(signature, alone, largest, most)[0]
    _log.warning(
        "model %s: a batch of %d rows, the largest, failed at load: %s; lower its max_batch_size",
        calls.name,
        most,
        calls.failure.reason,
    )
    return ""


class _Calls:
    """At most four calls of a function. `compares` is whether requests may share batches, so that rows are compared."""

    def __init__(self, name: str, call: BatchCall, clock: Callable[[], float], *, compares: bool) -> None:
        self.name = name
        self._call = call
        self._clock = clock
        self._compares = compares
        self.left = _MOST_CALLS
        self._models = _NoModels()
        # Of the last call that raised.
        self.failure = Failure(None, "", "")
        # By rows. The first call is left out, because it may compile, connect or read files.
        self.seconds: dict[int, float] = {}

    def run(self, inputs: Mapping[str, Array], rows: int) -> Mapping[str, Any] | None:
        """Call the function; return its outputs, None if it raised. StartError as in `check_at_load`."""
        self.left -= 1
        before = {name: array.tobytes() for name, array in inputs.items()}
        began = self._clock()
        outputs: Mapping[str, Any] | None = None
        try:
            with calls_through(self._models):
                outputs = self._call(inputs, ())
        except WrongOutputs as wrong:
            raise StartError(f"model {self.name!r}, trial run: {wrong}") from None
        except Exception as error:
            self.failure = error.failure if isinstance(error, FunctionRaised) else describe(error)
            if self.failure.hint:
                raise StartError(f"model {self.name!r}, trial run: {self.failure.hint}") from None
        if self._models.called:
            raise _CallsModel(self._models.called)
        if outputs is not None and self.left < _MOST_CALLS - 1:
            self.seconds[rows] = self._clock() - began
        for name, array in inputs.items():
            # Compiled code can ignore that an array is read-only.
            if array.tobytes() != before[name]:
                raise StartError(
                    f"model {self.name!r}, trial run: the function writes to its input {name!r}, which is read-only; copy "
                    "what you change, such as torch.tensor(x) in place of torch.from_numpy(x)"
                )
        return outputs

    def times(self) -> Mapping[int, float]:
        """Return the seconds by rows. The first batch of a size may be slow, as where code is compiled for each shape."""
        one = self.seconds.get(1, float("inf"))
        return {rows: min(took, rows * one) for rows, took in sorted(self.seconds.items())}

    def log_unchecked(self, level: int, why: str, remedy: str, details: str = "") -> None:
        """Log that the function was not checked, or its rows were not compared. `why` follows the model's name.

        `details` is a traceback, which may tell an error of the function.
        """
        _log.log(
            level if self._compares or details else logging.INFO,
            "model %s %s:%s its outputs are checked when it answers requests%s",
            self.name,
            why,
            " its rows were not compared, so it is batched as declared, and" if self._compares else "",
            f"; {remedy} to check it at load" if remedy else "",
            extra={EXCEPTION: details} if details else None,
        )


class _CallsModel(Exception):
    """The function called the model of this name. Other models can be called only once they are loaded, too."""


class _NoModels:
    """`ModelCaller` of calls at load."""

    def __init__(self) -> None:
        # The model that the function called last, if any.
        self.called = ""

    def submit(
        self, model: str, version: str, inputs: Mapping[str, Any], timeout: float | None
    ) -> Future[dict[str, Any]]:
        self.called = model
        raise NotReadyError(f"model {model!r} cannot be called in a trial run")


def _difference(
    signature: Signature, alone: Sequence[Mapping[str, Any]], together: Mapping[str, Any], rows: int
) -> tuple[str, int]:
    """Return how a row of a batch differs, and which of the rows alone it is; "" if none of the first and last rows does.

    The batch has the rows that ran alone in turn.
    """
    ends = {*range(rows)[:_COMPARED_ROWS], *range(rows)[-_COMPARED_ROWS:]}
    for spec in signature.outputs:
        for at in sorted(ends):
            expected = np.asarray(alone[at % len(alone)][spec.name][:1])
            got = np.asarray(together[spec.name][at : at + 1])
            if describe_difference(spec, expected, got):
                text = (
                    f"output {spec.name!r} of a row is {_shown(spec, expected)} if it runs alone, and {_shown(spec, got)} in a "
                    f"batch of {rows}"
                )
                return text, at % len(alone)
    return "", 0


def _shown(spec: TensorSpec, row: Array) -> str:
    values = (as_float64(row, spec) if spec.is_float else row).reshape(-1)
    shown = [f"{value:.6g}" if spec.is_float else repr(value) for value in values[:_SHOWN_VALUES].tolist()]
    more = f", ... ({values.size} values)" if values.size > _SHOWN_VALUES else ""
    return f"[{truncate(', '.join(shown), _SHOWN_CHARACTERS)}{more}]"


def _samples(declared: FunctionModel, signature: Signature, most: int) -> Iterator[list[Row]]:
    """Yield rows to run: one, and others to compare it with. Each of these is tried if the one before fails."""
    if declared.example is None:
        for size in _SIZES if varies(signature) else _SIZES[:1]:
            yield _drawn(signature, size)
        return
    arrays = _example(declared, signature)
    if not most:
        yield [arrays]
        return
    count = max(map(len, arrays.values()))
    rows = [{name: array[[at % len(array)]] for name, array in arrays.items()} for at in range(count)]
    others = [row for row in (*rows[1:], _scaled(signature, rows[0], _SMALL)) if _differ(rows[0], row)]
    yield [rows[0], *others[:1]]


def _drawn(signature: Signature, size: int) -> list[Row]:
    """Return a row of small positive numbers, one of large numbers of both signs, and another small one.

    The last two differ from the first in every input.
    """
    first, *rest = rows_of(signature, distinct_rows(signature, size))
    other = {
        name: next((row[name] for row in rest if not np.array_equal(row[name], array)), array)
        for name, array in first.items()
    }
    return [
        _scaled(signature, first, _SMALL),
        _scaled(signature, other, _LARGE),
        _scaled(signature, other, _SMALL),
    ]


def _scaled(signature: Signature, row: Row, factor: float) -> Row:
    """Return a row, multiplied by a factor.

    If the factor is small, numbers are positive, and integers are 0 and 1. Otherwise signs alternate, and strings are long.
    """
    scaled = dict(row)
    for spec in signature.inputs:
        array = row[spec.name]
        if spec.is_float:
            numbers = np.abs(as_float64(array, spec)) * factor
            if factor > 1:
                # The greatest value and the least one are both far from those of a small row.
                numbers.reshape(-1)[1::2] *= -1
            scaled[spec.name] = array_of_floats(numbers, spec.datatype)
        elif array.dtype.kind in "iu" and factor < 1:
            scaled[spec.name] = array % 2
        elif array.dtype.hasobject and factor > 1:
            scaled[spec.name] = np.full_like(array, spec.element("1000"))
    return scaled


def _differ(one: Row, other: Row) -> bool:
    return any(not np.array_equal(array, other[name]) for name, array in one.items())


def _example(declared: FunctionModel, signature: Signature) -> dict[str, Array]:
    """Return the declared example as arrays; StartError if it does not fit the inputs."""
    arrays: dict[str, Array] = {}
    for spec in signature.inputs:
        given: Any = (declared.example or {})[spec.name]
        try:
            if spec.datatype.size:
                array = from_numbers(given, spec.datatype)
            else:
                array = spec.elements(np.asarray(given, object))
        except (TypeError, ValueError) as error:
            raise StartError(
                f"model {declared.name!r}: the example of input {spec.name!r} is no array of {spec.datatype.name} ({error})"
            ) from None
        if not declared.batched:
            array = array[None]
        if not fits(spec, array.shape) or not array.size:
            raise StartError(
                f"model {declared.name!r}: the example of input {spec.name!r} has shape {list(array.shape)}; it must have at "
                f"least one row, and fit {list(spec.shape)}"
            )
        arrays[spec.name] = array
    return arrays
