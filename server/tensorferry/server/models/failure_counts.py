"""Counts of failed requests, by the reasons of Triton's metrics."""

from __future__ import annotations

from collections.abc import Mapping

from tensorferry.batcher import BatcherStatistics


def failures_by_reason(counts: BatcherStatistics) -> Mapping[str, int]:
    """The requests that got no answer, by the reasons that Triton has for it."""
    return {
        "REJECTED": counts.refused + counts.expired + counts.shed,
        "CANCELED": counts.cancelled,
        "BACKEND": counts.failed,
        "OTHER": counts.abandoned,
    }
