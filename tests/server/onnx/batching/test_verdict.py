"""The verdict follows from the graph and from running, and decides how a model is batched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import mixing, small
from support.server.rig import Load

from tensorferry.server.onnx.batching import verdict
from tensorferry.server.onnx.batching.comparison_runs import ComparisonSettings
from tensorferry.server.onnx.batching.verdict import BatchingFinding, BatchingVerdict, check_batching
from tensorferry.server.onnx.graph import BatchAnalysis, RowMixing
from tensorferry.server.runtime.session import Session

Build = Callable[[Path], Path]


def stopped_clock() -> float:
    return 0.0


def checked(path: Path) -> BatchingFinding:
    session = Session(path)
    return check_batching("m", path, session.signature, session.run, ComparisonSettings(clock=stopped_clock))


def test_a_model_with_an_unknown_operator_is_tested(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = checked(mixing.hashed(tmp_path / "m.onnx"))
    assert found.verdict is BatchingVerdict.TESTED
    assert "MurmurHash3 /hash" in found.reason
    (line,) = [one.getMessage() for one in caplog.records if "tested by running" in one.getMessage()]
    assert "batches of 2, 3, 5, 32 rows" in line
    assert line.endswith(found.reason)


# The finding of the graph analysis is given.


def analysed(monkeypatch: pytest.MonkeyPatch, finding: RowMixing, *reasons: str) -> None:
    monkeypatch.setattr(verdict, "analyse_batching", lambda path, inputs: BatchAnalysis(finding, reasons))


@pytest.mark.parametrize(
    ("finding", "build", "expected", "conclusive"),
    [
        (RowMixing.SEPARATE, small.twice, BatchingVerdict.PROVED, True),
        (RowMixing.UNKNOWN, small.twice, BatchingVerdict.TESTED, True),
        (RowMixing.MIXES, small.twice, BatchingVerdict.REFUSED, True),
        (RowMixing.SEPARATE, small.centred, BatchingVerdict.REFUSED, True),
        (RowMixing.UNKNOWN, small.centred, BatchingVerdict.REFUSED, True),
        (RowMixing.SEPARATE, lambda path: small.multiples_only(path, 11), BatchingVerdict.PROVED, True),
        (RowMixing.UNKNOWN, lambda path: small.multiples_only(path, 11), BatchingVerdict.REFUSED, False),
    ],
)
def test_the_verdict_follows_from_the_graph_and_from_running(
    finding: RowMixing,
    build: Build,
    expected: BatchingVerdict,
    conclusive: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    analysed(monkeypatch, finding, "Odd /a/node is an operator that cannot be analysed")
    found = checked(build(tmp_path / "m.onnx"))
    assert (found.verdict, found.conclusive) == (expected, conclusive), found.reason
    contradicts = finding is RowMixing.SEPARATE and expected is BatchingVerdict.REFUSED
    said = "model m: its graph keeps rows independent, but running it does not: output 'y'" in caplog.text
    assert said is contradicts


def test_only_three_reasons_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    analysed(monkeypatch, RowMixing.MIXES, *"abcde")
    assert checked(small.twice(tmp_path / "m.onnx")).reason == "a; b; c; and 2 more"


# How models are batched.


@pytest.mark.parametrize(
    ("policy", "finding", "most", "verdict_"),
    [
        ("proved", RowMixing.SEPARATE, 32, "proved"),
        ("proved", RowMixing.UNKNOWN, 0, "refused"),
        ("tested", RowMixing.SEPARATE, 32, "proved"),
        ("tested", RowMixing.UNKNOWN, 32, "tested"),
        ("tested", RowMixing.MIXES, 0, "refused"),
        ("trust", RowMixing.MIXES, 32, "trusted"),
    ],
)
def test_the_batching_option_decides_which_models_are_batched(
    policy: str, finding: RowMixing, most: int, verdict_: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    analysed(monkeypatch, finding, "why")
    model = load(small.twice, batching=policy)
    assert (model.max_batch_size, model.batching_verdict) == (most, verdict_)
    assert (f"({verdict_})" in model.batching) is (most > 0)


def test_a_model_without_a_batch_axis_is_unbatched_and_the_log_says_how_to_export_it(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(lambda path: small.twice(path, dims=(1, 3)), batching_rewrite=False)
    assert model.batching_verdict == "off"
    assert "torch.onnx.export(..., dynamic_shapes={'x': {0: 'batch'}}, or" in caplog.text
    assert "dynamic_axes={'x': {0: 'batch'}, 'y': {0: 'batch'}} with dynamo=False)" in caplog.text
