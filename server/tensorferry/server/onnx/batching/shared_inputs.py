"""The check of models with inputs that all rows of a batch share, such as a scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from tensorferry.server.onnx.batching.comparison_runs import ComparisonSettings
from tensorferry.server.onnx.batching.row_comparison import ComparisonOutcome, compare_rows
from tensorferry.server.runtime.checks.sampling import Array, Run, random_inputs
from tensorferry.server.signature import Signature

# The time of each comparison beyond the minimum.
_SECONDS = 0.25
_SEEDS = (1, 2)
_MIXES = (ComparisonOutcome.MIXES, ComparisonOutcome.FAILS, ComparisonOutcome.UNSTABLE)


def mixing_through_shared_inputs(
    signature: Signature, run: Run, settings: ComparisonSettings, size: int
) -> str | None:
    """Return why rows affect each other for some values of the shared inputs; "" if no such value was found.

    None if the time did not suffice. `compare_rows` uses one random value of each; this function adds zeros, ones and other
    random values. Values that the model rejects are ignored.
    """
    names = [signature.inputs[at].name for at in sorted(signature.shared_inputs(batched=True))]
    if not names:
        return ""
    drawn = [random_inputs(signature, 1, size, seed) for seed in _SEEDS]
    base = drawn[0]
    kinds = {spec.name: spec.datatype for spec in signature.inputs}
    numbers = [name for name in names if kinds[name].size]
    filled = [{**base, **{name: np.full_like(base[name], value) for name in numbers}} for value in (0, 1)]
    shorter = replace(settings, seconds=_SECONDS)
    for values in (*drawn, *filled):
        given = {name: values[name] for name in names}
        comparison = compare_rows(signature, partial(_run_with, run, given), shorter)
        if comparison.outcome is ComparisonOutcome.UNFINISHED:
            return None
        if comparison.outcome in _MIXES:
            return comparison.reason
    return ""


def _run_with(run: Run, given: Mapping[str, Array], inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    return run({**inputs, **given})
