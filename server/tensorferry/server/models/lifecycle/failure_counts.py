"""Counts of failed requests by the reasons in Triton's metrics."""

from __future__ import annotations

from collections.abc import Mapping

from tensorferry.batcher import BatcherStatistics


def failures_by_reason(counts: BatcherStatistics) -> Mapping[str, int]:
    """Return the number of failed requests by Triton's reasons."""
    return {
        "REJECTED": counts.refused + counts.expired + counts.shed,
        "CANCELED": counts.cancelled,
        "BACKEND": counts.failed,
        "OTHER": counts.abandoned,
    }
