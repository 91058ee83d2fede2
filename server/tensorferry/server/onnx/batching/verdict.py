"""The batching check: is a model proved, tested or refused, by its graph and by running it?"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tensorferry.server.onnx.batching.comparison_runs import ComparisonSettings
from tensorferry.server.onnx.batching.remedies import remedies_for
from tensorferry.server.onnx.batching.row_comparison import ComparisonOutcome, RowComparison, compare_rows
from tensorferry.server.onnx.graph import BatchAnalysis, RowMixing, analyse_batching, operator_types
from tensorferry.server.runtime.checks.sampling import Run, working_size
from tensorferry.server.signature import Signature

_log = logging.getLogger("tensorferry.server")

# How long a model is run beyond the minimum: briefly if running only confirms the graph's proof.
_SECONDS_TO_CONFIRM = 0.25
_SECONDS_TO_TEST = 1.0
# Most reasons named in the log; a large graph may have hundreds.
_MOST_REASONS = 3
# The precision of a quantised model: a rounding step of 8 bits turns a difference in a sum's last bit into this.
_QUANTISED_PRECISION = 5e-2


class BatchingVerdict(enum.Enum):
    """Why requests may or may not share batches. Clients read the values."""

    PROVED = "proved"
    """The model's graph keeps rows independent, and running it does not contradict that."""
    TESTED = "tested"
    """Running shows no mixing. A part of the graph could not be analysed, or the model is a function."""
    TRUSTED = "trusted"
    """The operator or a function's author asked for batching without the check, or the check was inconclusive."""
    REFUSED = "refused"
    """The graph or running shows that rows mix, or the check was inconclusive."""
    OFF = "off"
    """Batching was not requested, or the model has no batch axis."""


# Verdicts of the check itself.
_FOUND = (BatchingVerdict.PROVED, BatchingVerdict.TESTED, BatchingVerdict.REFUSED)


@dataclass(frozen=True, slots=True)
class BatchingFinding:
    """The result of the batching check.

    `working_size` is a length of the other dynamic axes with which the model runs; None if none was found.
    `conclusive` is false for a refusal without evidence that rows mix. `evidence` describes the batches that were run;
    empty if none was. `remedies` say what to change in a refused model. `seconds` has the time of one row and of two, by rows.
    `lasting` is false if another check may find something else.
    """

    verdict: BatchingVerdict
    reason: str
    working_size: int | None
    conclusive: bool = True
    evidence: str = ""
    remedies: tuple[str, ...] = ()
    seconds: Mapping[int, float] = field(default_factory=dict)
    lasting: bool = True

    def to_json(self) -> Mapping[str, Any]:
        """Return the finding in a form for `from_json`."""
        return {**asdict(self), "verdict": self.verdict.value}

    @classmethod
    def from_json(cls, kept: Any) -> BatchingFinding | None:
        """Return a finding that `to_json` returned; None if it is something else."""
        try:
            found = cls(**kept)
            verdict, size = BatchingVerdict(found.verdict), found.working_size
            seconds = {int(rows): float(took) for rows, took in found.seconds.items()}
            if verdict not in _FOUND or not (size is None or (type(size) is int and size > 0)):
                return None
            if not all(rows > 0 and 0 <= took < math.inf for rows, took in seconds.items()):
                return None
            return replace(
                found,
                verdict=verdict,
                reason=str(found.reason),
                evidence=str(found.evidence),
                remedies=tuple(map(str, found.remedies)),
                seconds=seconds,
            )
        except (AttributeError, TypeError, ValueError):
            return None


def check_batching(
    name: str,
    path: Path,
    signature: Signature,
    run: Run,
    settings: ComparisonSettings,
    first_run: Run | None = None,
    unprovable: str = "",
    run_alone: Run | None = None,
) -> BatchingFinding:
    """Check a model whose signature has a batch axis, and log the evidence. Arguments are as in `compare_rows`.

    `unprovable` is a reason why the graph does not say what is computed; empty if there is none.
    """
    analysis = analyse_batching(path, [spec.name for spec in signature.inputs if spec.has_row_axis])
    if unprovable and analysis.finding is RowMixing.SEPARATE:
        analysis = BatchAnalysis(RowMixing.UNKNOWN, (unprovable,))
    operators = operator_types(path)
    if analysis.finding is RowMixing.MIXES:
        # The model is not run, because running can miss the mixing.
        size, _ = working_size(signature, run)
        remedies = remedies_for(analysis.reasons, operators)
        return BatchingFinding(
            BatchingVerdict.REFUSED, _reasons(analysis), size, remedies=remedies, lasting=size is not None
        )
    proved = analysis.finding is RowMixing.SEPARATE
    if any("QuantizeLinear" in operator or operator.startswith("QLinear") for operator in operators):
        settings = replace(settings, precision=max(settings.precision, _QUANTISED_PRECISION))
    seconds = _SECONDS_TO_CONFIRM if proved else _SECONDS_TO_TEST
    settings = replace(settings, seconds=seconds, thorough=not proved)
    comparison = compare_rows(signature, run, settings, first_run, run_alone)
    if comparison.outcome is ComparisonOutcome.UNFINISHED:
        return unfinished(_reasons(analysis), comparison.working_size, comparison.seconds)
    if comparison.outcome in (ComparisonOutcome.SEPARATE, ComparisonOutcome.DOES_NOT_RUN):
        return _unrefuted(name, analysis, comparison)
    if proved and comparison.outcome in (ComparisonOutcome.MIXES, ComparisonOutcome.FAILS):
        _log.warning(
            "model %s: its graph keeps rows independent, but running it does not: %s; an operator deviates from its "
            "definition, or the analysis has a bug",
            name,
            comparison.reason,
        )
    # What could not be analysed is the likely cause.
    return BatchingFinding(
        BatchingVerdict.REFUSED,
        comparison.reason,
        comparison.working_size,
        evidence=comparison.extent,
        remedies=remedies_for((*analysis.reasons, comparison.reason), operators),
        seconds=comparison.seconds,
        # Rows may fail together for lack of memory.
        lasting=comparison.outcome is not ComparisonOutcome.FAILS,
    )


def unfinished(unknown: str, working_size: int | None, seconds: Mapping[int, float]) -> BatchingFinding:
    """Return the finding for a model whose rows must be compared, which takes longer than a load may.

    `unknown` is why its graph is not enough.
    """
    reason = (
        "its rows are not compared, because that takes longer than a load may; its graph could not be analysed fully: "
        f"{unknown}"
    )
    remedy = (
        "wait until the server has had no request for five seconds, when it compares its rows, or run `tensorferry inspect "
        "MODEL` with the server's options before its start"
    )
    return BatchingFinding(
        BatchingVerdict.REFUSED, reason, working_size, remedies=(remedy,), seconds=seconds, lasting=False
    )


def _unrefuted(name: str, analysis: BatchAnalysis, comparison: RowComparison) -> BatchingFinding:
    """Return and log the finding for a model whose runs show no mixing, or that could not be run."""
    proved, unknown = analysis.finding is RowMixing.SEPARATE, _reasons(analysis)
    if comparison.outcome is ComparisonOutcome.DOES_NOT_RUN:
        if proved:
            _log.info(
                "model %s: rows are independent, proved by its graph alone: %s", name, comparison.reason
            )
            return BatchingFinding(BatchingVerdict.PROVED, "", None, lasting=False)
        reason = f"{comparison.reason}, and its graph could not be analysed fully: {unknown}"
        remedies = remedies_for((*analysis.reasons, comparison.reason))
        return BatchingFinding(
            BatchingVerdict.REFUSED, reason, None, conclusive=False, remedies=remedies, lasting=False
        )
    how = "proved by its graph and confirmed by running" if proved else "tested by running"
    more = f"; its graph could not be analysed fully: {unknown}" if unknown else ""
    _log.info("model %s: rows are independent, %s: %s%s", name, how, comparison.extent, more)
    return BatchingFinding(
        BatchingVerdict.PROVED if proved else BatchingVerdict.TESTED,
        unknown,
        comparison.working_size,
        evidence=comparison.extent,
        seconds=comparison.seconds,
    )


def _reasons(analysis: BatchAnalysis) -> str:
    named = "; ".join(analysis.reasons[:_MOST_REASONS])
    more = len(analysis.reasons) - _MOST_REASONS
    return f"{named}; and {more} more" if more > 0 else named
