"""The probe finds in a child process which axes may have length zero, and caches the result."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.models import recurrent, small
from support.models.small import value, written

from tensorferry.batcher import Tensor
from tensorferry.server.errors import NotReadyError
from tensorferry.server.models.config_pbtxt.io_mapping import IoMapping
from tensorferry.server.onnx.probes import empty_axes_probe
from tensorferry.server.onnx.probes.empty_axes_probe import EmptyAxesProbe, ProbedModel
from tensorferry.server.runtime.checks.check_cache import CheckCache, digest_of
from tensorferry.server.runtime.files.file_record import FileRecord
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session

CRASHES = "with it ONNX Runtime crashes"
FAILS = "with it the model fails"


@pytest.fixture
def cache(check_cache: Path) -> Path:
    return check_cache / "empty-axes"


def no_child(*_: Any, **__: Any) -> None:
    raise OSError("no process can be started")


def subject(path: Path, max_batch_size: int = 4, **fields: Any) -> ProbedModel:
    io_mapping = IoMapping(Session(path).signature)
    made = ProbedModel("m", path, OrtOptions(), io_mapping, max_batch_size, 2)
    return replace(made, **fields)


def made(given: ProbedModel) -> EmptyAxesProbe:
    return EmptyAxesProbe(given, CheckCache(given.path, given.ort_options, ("cpu",)))


def verdicts(given: ProbedModel) -> Mapping[Any, str]:
    probe = made(given)
    probe.start()
    probe.wait()
    assert probe.found.verdicts is not None
    return probe.found.verdicts


def hanging(path: Path) -> Path:
    """x FP32 [batch, n] → y FP32 [batch, n], after 2**62 iterations of a loop if n is 0."""
    text = """(float[batch, n] x) => (float[batch, n] y) {
        shape = Shape (x) length = Gather (shape, one) empty = Equal (length, zero) turns = Where (empty, most, zero)
        end = Loop <body = b (int64 i, bool on, int64 state) => (bool still_on, int64 after) {
            still_on = Identity (on) after = Identity (state)
        }> (turns, yes, zero)
        none = Cast <to = 1> (end) y = Add (x, none)
    }"""
    return written(path, text, one=np.int64(1), zero=np.int64(0), most=np.int64(2**62), yes=True)


def test_a_crash_of_the_child_is_a_verdict(tmp_path: Path) -> None:
    given = subject(recurrent.gru(tmp_path / "gru.onnx"))
    assert verdicts(given) == {frozenset({("ids", 1)}): CRASHES}
    # Axis 0 is probed only if it is not the batch axis.
    assert verdicts(replace(given, max_batch_size=0)) == {
        frozenset({("ids", 0)}): CRASHES,
        frozenset({("ids", 1)}): CRASHES,
        frozenset({("ids", 0), ("ids", 1)}): CRASHES,
    }


def test_axes_with_one_name_are_probed_together_and_in_all_combinations(tmp_path: Path) -> None:
    """The inputs have three symbols, and share one of them."""
    x, mask = value("x", dims=["batch", "n", "k"]), value("mask", dims=["batch", "n", None])
    path = small.identity(tmp_path / "m.onnx", x, mask)
    n, k, rest = {("x", 1), ("mask", 1)}, {("x", 2)}, {("mask", 2)}
    expected = [n, k, rest, n | k, n | rest, k | rest, n | k | rest]
    assert verdicts(subject(path)) == {frozenset(axes): "" for axes in expected}


def test_a_failing_run_is_a_verdict(tmp_path: Path) -> None:
    text = "(float[batch, n] x) => (float[batch] y) { y = Gather <axis = 1> (x, zero) }"
    path = written(tmp_path / "first.onnx", text, zero=np.int64(0))
    assert verdicts(subject(path)) == {frozenset({("x", 1)}): FAILS}


def test_a_hanging_run_is_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(empty_axes_probe, "_RUN_SECONDS", 1)
    given = subject(hanging(tmp_path / "m.onnx"))
    assert verdicts(given) == {frozenset({("x", 1)}): "with it the model does not end"}


def test_closing_kills_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test would take as long as the limit of one run."""
    monkeypatch.setattr(empty_axes_probe, "_RUN_SECONDS", 10**6)
    probe = made(subject(hanging(tmp_path / "m.onnx")))
    probe.start()
    probe.close()


def test_until_the_probe_ends_requests_are_asked_to_come_again(tmp_path: Path) -> None:
    given = subject(small.echo(tmp_path / "echo.onnx"))
    probe = made(given)
    request = [Tensor(np.dtype(np.float32), (1, 0), b"")]
    for _ in range(2):
        with pytest.raises(NotReadyError, match=r"axis 1 of input 'x' .* send it again in a few seconds"):
            probe.found.check("m", given.io_mapping.signature, request)
    probe.start()
    probe.wait()
    probe.found.check("m", given.io_mapping.signature, request)


def test_the_converted_file_is_kept_until_the_probe_ends(tmp_path: Path) -> None:
    given, ended = subject(small.echo(tmp_path / "echo.onnx")), threading.Event()
    files = ExitStack()
    files.callback(ended.set)
    probe = EmptyAxesProbe(given, CheckCache(given.path, given.ort_options, ("cpu",)), files)
    assert not ended.is_set()
    probe.start()
    probe.wait()
    assert ended.is_set()
    # Nothing is run if the result is cached.
    files.callback(ended.clear)
    EmptyAxesProbe(given, CheckCache(given.path, given.ort_options, ("cpu",)), files).start()
    assert not ended.is_set()


def test_no_child_is_started_without_axes_to_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_child)
    fixed = small.twice(tmp_path / "fixed.onnx")
    assert verdicts(subject(fixed)) == {}
    # A model that does not run at all is not probed.
    assert verdicts(subject(small.echo(tmp_path / "echo.onnx"), working_size=None)) == {}


def test_results_are_cached_per_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = subject(recurrent.gru(tmp_path / "gru.onnx"))
    found = verdicts(given)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(subprocess, "Popen", no_child)
    assert verdicts(given) == found == {frozenset({("ids", 1)}): CRASHES}
    # Another model with the same path is probed again.
    given.path.write_bytes(given.path.read_bytes() + b"\x12\x01m")
    assert verdicts(given) == {}


def test_an_invalid_cache_entry_is_ignored(tmp_path: Path, cache: Path) -> None:
    given = subject(small.echo(tmp_path / "echo.onnx"))
    found = verdicts(given)
    (kept,) = cache.iterdir()
    for text in ("[", '[["a"]]'):
        kept.write_text(text)
        assert verdicts(given) == found == {frozenset({("x", 1)}): ""}


def test_a_child_that_cannot_load_the_model_gives_no_verdict(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = subject(small.echo(tmp_path / "echo.onnx"))
    assert verdicts(replace(given, path=tmp_path / "gone.onnx")) == {
        frozenset({("x", 1)}): "this could not be tested"
    }
    assert "does not load on the CPU" in caplog.text
    assert not cache.exists()


def test_the_digest_covers_external_data(tmp_path: Path) -> None:
    path = small.wide(tmp_path / "m.onnx", 64)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (tmp_path / "weights.bin").stat().st_size
    files = FileRecord(path).paths
    before = digest_of(files, "")
    assert digest_of(files, "") == before != digest_of(files, "another version")
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.write(b"\x01\x02")
    assert digest_of(files, "") != before
