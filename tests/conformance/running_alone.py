"""What the server would decide by running a model alone, without the analysis of its graph."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from tensorferry.server.onnx.batching import verdict
from tensorferry.server.onnx.batching.comparison_runs import ComparisonSettings
from tensorferry.server.onnx.batching.verdict import BatchingVerdict, check_batching
from tensorferry.server.onnx.graph import BatchAnalysis, RowMixing
from tensorferry.server.runtime.files.onnx_file import string_lists
from tensorferry.server.runtime.session import Session


def batchable(path: Path) -> Session | None:
    """Return a session of a model; None if it cannot be batched, whatever a check finds."""
    try:
        session = Session(path)
    except Exception:
        return None
    return session if session.signature.no_batch_axis_reason() is None else None


def passes_by_running(path: Path) -> bool | None:
    """Return whether the check of a server passes the model by running alone, however long it takes.

    None if the model cannot be batched.
    """
    session = batchable(path)
    if session is None:
        return None
    # On this clock, the check never runs out of time.
    settings = ComparisonSettings(vocabularies=string_lists(path), clock=lambda: 0.0)
    unknown = BatchAnalysis(RowMixing.UNKNOWN, ("its graph is not analysed",))
    with mock.patch.object(verdict, "analyse_batching", return_value=unknown):
        found = check_batching(path.stem, path, session.signature, session.run, settings)
    return found.verdict is BatchingVerdict.TESTED
