"""The verdict on a model: proved, tested or refused, by its graph and by running it."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from tensorferry.server.batching_check import quantisation
from tensorferry.server.batching_check.row_comparison import (
    ComparisonOutcome,
    ComparisonSettings,
    RowComparison,
    compare_rows,
)
from tensorferry.server.batching_check.row_kinds import has_rows
from tensorferry.server.onnx_graph import BatchAnalysis, RowMixing, analyse_batching
from tensorferry.server.runtime.sampling import Run, working_size
from tensorferry.server.signature import Signature

_log = logging.getLogger("tensorferry.server")

# How long a model is run beyond the least: little where running only confirms what the graph proves.
_SECONDS_TO_CONFIRM = 0.25
_SECONDS_TO_TEST = 1.0
# Reasons that are named; of a large graph there may be hundreds.
_MOST_REASONS = 3


class BatchingVerdict(enum.Enum):
    """Why requests share batches, or that they must not. The values are what clients read."""

    PROVED = "proved"
    """The model's graph keeps rows apart, and running it agrees."""
    TESTED = "tested"
    """Running shows no mixing; the graph could not be analysed wholly."""
    TRUSTED = "trusted"
    """The operator says so."""
    REFUSED = "refused"
    """The graph or running shows that rows mix, or nothing shows that they do not."""
    OFF = "off"
    """Batching is not asked for, or the model has no batch axis."""


@dataclass(frozen=True, slots=True)
class BatchingFinding:
    """A verdict, why, and the size that the other varying dimensions were given.

    `size` is None when the model ran with none of the sizes tried. `shown` is false where nothing is known either way.
    """

    verdict: BatchingVerdict
    reason: str
    size: int | None
    shown: bool = True


def check_batching(
    name: str,
    path: Path,
    signature: Signature,
    run: Run,
    conditions: ComparisonSettings,
    first_run: Run | None = None,
) -> BatchingFinding:
    """The verdict on a model whose signature has a batch axis, with a line in the log on what it rests."""
    analysis = analyse_batching(path, [spec.name for spec in signature.inputs if has_rows(spec)])
    if analysis.finding is RowMixing.MIXES:
        # Running may miss it, so that running is not asked.
        return _refused(_listed(analysis), path, working_size(signature, run)[0])
    proved = analysis.finding is RowMixing.SEPARATE
    if quantisation.is_quantised(path):
        conditions = replace(conditions, precision=max(conditions.precision, quantisation.PRECISION))
    seconds = _SECONDS_TO_CONFIRM if proved else _SECONDS_TO_TEST
    comparison = compare_rows(
        signature, run, replace(conditions, seconds=seconds, thorough=not proved), first_run
    )
    return _weighed(name, path, analysis, comparison)


def _weighed(name: str, path: Path, analysis: BatchAnalysis, comparison: RowComparison) -> BatchingFinding:
    proved = analysis.finding is RowMixing.SEPARATE
    if comparison.outcome is ComparisonOutcome.APART:
        if proved:
            _log.info(
                "model %s: rows are kept apart, proved by its graph; running agrees: %s",
                name,
                comparison.extent,
            )
            return BatchingFinding(BatchingVerdict.PROVED, "", comparison.size)
        unknown = _listed(analysis)
        _log.info(
            "model %s: rows are kept apart, tested by running: %s; its graph could not be analysed wholly: %s",
            name,
            comparison.extent,
            unknown,
        )
        return BatchingFinding(BatchingVerdict.TESTED, unknown, comparison.size)
    if comparison.outcome is ComparisonOutcome.DOES_NOT_RUN:
        if proved:
            _log.info("model %s: rows are kept apart, proved by its graph alone: %s", name, comparison.reason)
            return BatchingFinding(BatchingVerdict.PROVED, "", None)
        reason = f"{comparison.reason}, and its graph could not be analysed wholly: {_listed(analysis)}"
        return BatchingFinding(BatchingVerdict.REFUSED, reason, None, shown=False)
    if proved and comparison.outcome is ComparisonOutcome.MIXES:
        _log.warning(
            "model %s: its graph keeps rows apart, but running it does not: %s; an operator computes otherwise than "
            "its definition, or this is a bug of the analysis",
            name,
            comparison.reason,
        )
    return _refused(comparison.reason, path, comparison.size)


def _refused(reason: str, path: Path, size: int | None) -> BatchingFinding:
    if quantisation.is_quantised_dynamically(path):
        reason = f"{reason}; {quantisation.CURE}"
    return BatchingFinding(BatchingVerdict.REFUSED, reason, size)


def _listed(analysis: BatchAnalysis) -> str:
    named = "; ".join(analysis.reasons[:_MOST_REASONS])
    more = len(analysis.reasons) - _MOST_REASONS
    return f"{named}; and {more} more" if more > 0 else named
