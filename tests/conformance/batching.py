"""`make batching-evidence`: the verdicts of the graph analysis, compared with runs of the models.

The models are the onnx package's node tests and small graphs with dynamic first axes, and models as
exporters make them. Prints how many are proved, tested and refused, and how many of those refused
running alone would have passed; the exit status is 1 if one that mixes rows is proved.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from conformance.cases import Array, Case, all_cases, opened, session_of
from conformance.exported import exported
from conformance.running_alone import batchable, passes_by_running
from onnx import numpy_helper

from tensorferry.server.onnx.batching.comparison_runs import ComparisonSettings
from tensorferry.server.onnx.batching.row_comparison import ComparisonOutcome, compare_rows
from tensorferry.server.onnx.graph import BatchAnalysis, RowMixing, analyse_batching

# Rows of one model, and the number of batches made of them.
_ROWS = 6
_BATCHES = ([0, 1], [2, 0], [3, 4, 5], [1, 5, 0, 2], [4, 3, 2, 1, 0], [0, 5], [5, 5, 1])
# Relative to the largest magnitude in a row: more than rounding changes.
_TOLERANCE = {"float16": 2e-2, "bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-6}
_WORDS = {RowMixing.SEPARATE: "proved", RowMixing.UNKNOWN: "tested", RowMixing.MIXES: "refused"}


@dataclass(frozen=True, slots=True)
class Model:
    """A model whose inputs all have a batch axis, and some rows that it accepts."""

    name: str
    model: onnx.ModelProto
    rows: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Compared:
    """A model with the verdict of the analysis and the result of running it: "" if rows stay apart,
    None if it does not run.

    `passes_alone`: the server's check would have passed it by running alone. None unless the
    analysis refuses it, or if it cannot be batched.
    """

    name: str
    analysis: BatchAnalysis
    mixing: str | None
    passes_alone: bool | None = None


def main() -> int:
    """Return 0 if nothing that mixes rows is proved, and 90 % of the models that do not mix are."""
    parser = argparse.ArgumentParser(prog="conformance.batching", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose names contain this")
    arguments = parser.parse_args()
    onnxruntime.set_default_logger_severity(4)
    logging.disable()
    cases = [case for case in all_cases() if arguments.only in case.name]
    compared = [compare(model) for case in cases for model in variants(case)]
    good = report(compared)
    print("\nmodels as exporters make them:")
    for one in exported():
        if arguments.only not in one.name:
            continue
        found = compare(Model(one.name, one.model, one.rows))
        running = {None: "does not run", "": "rows apart"}.get(found.mixing, found.mixing)
        reason = "".join(f" ({reason})" for reason in found.analysis.reasons[:1])
        alone = "; running alone would have passed" if found.passes_alone else ""
        print(f"  {one.name:28} {_WORDS[found.analysis.finding]}{reason}; running: {running}{alone}")
        good = good and found.analysis.finding is one.finding
    return 0 if good else 1


def report(compared: Sequence[Compared]) -> bool:
    """Print the figures and the models that could be better; return whether the requirements are met."""
    ran = [one for one in compared if one.mixing is not None]
    print(f"{len(compared)} models, {len(ran)} of them run with one row")
    counts = Counter((_WORDS[one.analysis.finding], not one.mixing) for one in ran)
    for word in _WORDS.values():
        print(
            f"  {word:8} {counts[word, True]:5} keep rows apart {counts[word, False]:5} mix rows, or do not batch"
        )
    _report_refused(compared)
    for one in ran:
        if one.analysis.finding is RowMixing.SEPARATE and one.mixing:
            print(f"PROVED BUT MIXING  {one.name}: {one.mixing}")
    for word in ("tested", "refused"):
        print(f"\nkeep rows apart, but {word}:")
        for one in ran:
            if _WORDS[one.analysis.finding] == word and not one.mixing:
                print(f"  {one.name}: {one.analysis.reasons[0]}")
    apart = sum(counts[word, True] for word in _WORDS.values())
    share = counts["proved", True] / apart if apart else 1.0
    print(f"\nproved of those that keep rows apart: {share:.1%} of {apart}")
    return not counts["proved", False] and share >= 0.9


def _report_refused(compared: Sequence[Compared]) -> None:
    """Print as a table, by the operator that mixes rows, whether running alone would have refused the models too."""
    refused = [one for one in compared if one.passes_alone is not None]
    passed = [one for one in refused if one.passes_alone]
    print(
        f"\nrefused by the graph and with a batch axis: {len(refused)}; running alone would have passed {len(passed)}"
    )
    print("\n| node | refused | running alone would have passed |\n| --- | ---: | ---: |")
    every, alone = (Counter(_node_of(one.analysis.reasons[0]) for one in ones) for ones in (refused, passed))
    for node, count in sorted(every.items()):
        print(f"| {node} | {count} | {alone[node]} |")
    print("\nrunning alone would have passed:")
    for one in passed:
        print(f"  {one.name}: {one.analysis.reasons[0]}; {one.mixing or 'no mixing was found'}")


def _node_of(reason: str) -> str:
    """Return the operator that a reason names."""
    name = reason.split()[0]
    return "an output without rows" if name == "output" else f"`{name}`"


def variants(case: Case) -> Iterator[Model]:
    """Yield the case with all first axes dynamic, and with that of its first input, beside constants."""
    data = case.data[0] if case.data else None
    if data is None or not all(isinstance(value, np.ndarray) for value in data.inputs.values()):
        return
    inputs = {name: np.asarray(value) for name, value in data.inputs.items()}
    if not inputs:
        return
    whole = opened(case)
    if whole is not None and len({len(array) for array in inputs.values()}) == 1:
        yield Model(f"{case.name}.all", whole.model, inputs)
    first = case.model.graph.input[0].name
    if len(inputs) > 1 and inputs[first].ndim:
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        del model.graph.input[1:]
        try:
            constants = [numpy_helper.from_array(inputs[name], name) for name in list(inputs)[1:]]
        except (ValueError, NotImplementedError, TypeError, KeyError):
            return
        model.graph.initializer.extend(constants)
        single = opened(replace(case, model=model))
        if single is not None:
            yield Model(f"{case.name}.first", single.model, {first: inputs[first]})


def compare(model: Model) -> Compared:
    """Compare the verdict of the analysis with a run of the model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        path.write_bytes(model.model.SerializeToString())
        analysis = analyse_batching(path, list(model.rows))
        own, tried = _own_rows(model), _tried_rows(path)
        alone = passes_by_running(path) if analysis.finding is RowMixing.MIXES else None
    return Compared(model.name, analysis, own or tried or (own if tried is None else tried), alone)


def _tried_rows(path: Path) -> str | None:
    """Return `Compared.mixing` with the rows of the server's own check."""
    session = batchable(path)
    if session is None:
        return None
    comparison = compare_rows(session.signature, session.run, ComparisonSettings(max_batch_size=8, seconds=0))
    # Some of the drawn rows may fail alone, for example by a division by zero.
    if comparison.outcome is ComparisonOutcome.DOES_NOT_RUN or "not several together" in comparison.reason:
        return None
    return "" if comparison.outcome is ComparisonOutcome.SEPARATE else comparison.reason


def _own_rows(model: Model) -> str | None:
    """Return the same for the model's own rows, which it accepts, and for rows made from them."""
    try:
        session = session_of(model.model)
    except Exception:
        return None
    ran = False
    for rows in _draws(model.rows):
        alone = []
        for at in range(_ROWS):
            try:
                feed = {name: array[at : at + 1] for name, array in rows.items()}
                alone.append(list(map(np.asarray, session.run(None, feed))))
            except Exception:
                break
        if len(alone) < _ROWS:
            continue
        ran = True
        found = _together(session, rows, alone)
        if found:
            return found
    return "" if ran else None


def _together(session: object, rows: Mapping[str, Array], alone: Sequence[Sequence[Array]]) -> str:
    for chosen in _BATCHES:
        feed = {name: np.ascontiguousarray(array[chosen]) for name, array in rows.items()}
        try:
            outputs = list(map(np.asarray, session.run(None, feed)))  # type: ignore[attr-defined]
        except Exception as error:
            return f"does not run several rows: {' '.join(str(error).split())[:120]}"
        for number, output in enumerate(outputs):
            if output.shape[:1] != (len(chosen),):
                return f"output {number} has shape {list(output.shape)} for {len(chosen)} rows"
            for place, row in enumerate(chosen):
                if _differs(alone[row][number], output[place : place + 1]):
                    return f"output {number} of row {row} is another among {chosen}"
    return ""


def _differs(expected: Array, got: Array) -> bool:
    if expected.shape != got.shape:
        return True
    tolerance = _TOLERANCE.get(expected.dtype.name)
    if tolerance is None:
        return not np.array_equal(expected, got)
    a, b = expected.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return True
    return bool(finite.any()) and bool(
        np.abs(a[finite] - b[finite]).max() > tolerance * max(np.abs(a[finite]).max(), 1e-30)
    )


def _draws(given: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Return rows of the case in other orders, with other magnitudes, constants, NaN and infinity."""
    generator = np.random.default_rng(1)
    if not all(map(len, given.values())):
        return
    order = {name: array[generator.integers(0, len(array), _ROWS)] for name, array in given.items()}
    yield order
    yield {name: _mixed(array, generator) for name, array in order.items()}
    yield {name: _scaled(array) for name, array in order.items()}
    for special in (np.nan, np.inf, -np.inf):
        spoiled = {name: array.copy() for name, array in order.items()}
        for array in spoiled.values():
            if array.dtype.kind == "f":
                array[5] = special
        yield spoiled


def _mixed(array: Array, generator: np.random.Generator) -> Array:
    """Return rows whose elements are each taken from any row at their place."""
    rows = generator.integers(0, len(array), array.shape)
    return np.ascontiguousarray(np.take_along_axis(array, rows, 0))


def _scaled(array: Array) -> Array:
    if array.dtype.kind == "f":
        scales = np.array([1.0, 0.0, 1e3, -1.0, 1e-3, 7.0])
        with np.errstate(all="ignore"):
            return np.asarray((array.astype(np.float64).T * scales).T, array.dtype)
    if array.dtype.kind in "iu":
        return np.asarray((array.T * np.array([1, 0, 1, 1, 0, 1])).T, array.dtype)
    return array


if __name__ == "__main__":
    sys.exit(main())
