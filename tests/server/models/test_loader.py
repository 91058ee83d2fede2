"""Loading decides how a model is batched, and logs it."""

from __future__ import annotations

import gc
import json
import logging
import threading
import weakref
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polling import until
from support.models import external, mixing, small
from support.server.rig import PATIENCE, Array, Load, fp32

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.models.lifecycle import loader
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.onnx.inspection.inspection import Wanted, inspect_model
from tensorferry.server.runtime.checks import check_cache
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.checks.trial_runs import loads_still_run
from tensorferry.server.runtime.files import fp16
from tensorferry.server.runtime.recovery.watchdog import Watchdog
from tensorferry.server.runtime.session import Session


@pytest.fixture
def load(load: Load) -> Load:
    """Load a model whose name differs from that of its file."""
    return partial(load, name="named")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each run of a session."""
    seen: list[int] = []
    run = Session.run

    def recorded(self: Session, inputs: Mapping[str, Array]) -> dict[str, Array]:
        seen.append(len(next(iter(inputs.values()))))
        return run(self, inputs)

    monkeypatch.setattr(Session, "run", recorded)
    return seen


def test_a_path_that_the_system_refuses_is_an_error_for_the_operator(load: Load) -> None:
    """As in a directory that the process may not enter."""
    source = ModelSource("m", Path("x" * 300) / "m.onnx")
    with pytest.raises(StartError, match=r"model 'm' cannot be loaded: .* File name too long: .*/m\.onnx"):
        loader.load_model(source, LoadContext(ServerConfig((source,))))


def test_a_second_load_runs_one_row(load: Load, runs: list[int]) -> None:
    """What the first load found is cached: how it is batched, and what one row and two rows took."""
    first = load(small.twice, max_batch_size=8)
    assert max(runs) == 8
    runs.clear()
    second = load(small.twice, max_batch_size=8)
    assert runs == [1]
    assert second.batching == first.batching
    assert second.batcher.statistics().buckets == first.batcher.statistics().buckets


@pytest.mark.parametrize("change", ["the file", "an option"])
def test_a_load_of_something_else_is_checked(change: str, load: Load, runs: list[int]) -> None:
    load(small.twice, max_batch_size=8)
    runs.clear()
    most = 7 if change == "an option" else 8
    load(
        lambda path: small.twice(path, dims=("batch", 4 if change == "the file" else 3)), max_batch_size=most
    )
    assert max(runs) == most


@pytest.mark.parametrize(
    "changes",
    [None, {"verdict": "sure"}, {"verdict": "trusted"}, {"working_size": -1}, {"seconds": {"0": 1.0}}],
    ids=str,
)
def test_a_cache_entry_that_is_no_finding_is_ignored(
    changes: Mapping[str, Any] | None, load: Load, runs: list[int], check_cache: Path
) -> None:
    load(small.twice, max_batch_size=8)
    (entry,) = (check_cache / "batching").iterdir()
    kept = json.loads(entry.read_bytes())
    entry.write_text("[" if changes is None else json.dumps({**kept, **changes}))
    runs.clear()
    assert load(small.twice, max_batch_size=8).batching_verdict == "proved"
    assert max(runs) == 8


def test_a_size_of_the_cache_that_does_not_run_is_ignored(load: Load, check_cache: Path) -> None:
    """For instance because other weights are beside the file than a digest can see."""
    load(lambda path: small.multiples_only(path, 4), max_batch_size=8)
    (entry,) = (check_cache / "batching").iterdir()
    kept = json.loads(entry.read_bytes())
    entry.write_text(json.dumps({**kept, "working_size": 3, "verdict": "refused"}))
    assert load(lambda path: small.multiples_only(path, 4), max_batch_size=8).batching_verdict == "proved"


@pytest.mark.parametrize("config", [None, "max_batch_size: 8 dynamic_batching { }"])
def test_a_model_whose_comparison_takes_too_long_is_batched_after_an_inspection(
    config: str | None,
    load: Load,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    no_time = partial(LoadBudget, clock=count(step=100).__next__)
    model = load(mixing.hashed, config, max_batch_size=8, new_budget=no_time)
    assert model.batching_verdict == "refused"
    assert "its rows are not compared, because that takes longer than a load may" in caplog.text
    assert "run `tensorferry inspect MODEL` with the server's options" in caplog.text
    parsed = None if config is None else parse_config(config, "test")
    source = ModelSource("named", tmp_path / "m.onnx", config=parsed)
    (inspected,) = inspect_model(source, ServerConfig((source,), max_batch_size=8), Wanted(measure=False))
    assert inspected.decision.verdict == "tested"
    assert load(mixing.hashed, config, max_batch_size=8).batching_verdict == "tested"


def test_a_model_that_rejects_random_input_is_served_unbatched_without_warm_up(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = load(mixing.hashed_elevens)
    assert (model.max_batch_size, model.batching_verdict) == (0, "refused")
    assert "it does not run on random input" in caplog.text
    assert model.batcher.submit_rows({"x": fp32(1, 22)}).result(30)["y"].shape == (1, 2, 11)


def test_a_proved_model_that_rejects_random_input_is_served_batched_without_warm_up(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = load(lambda path: small.multiples_only(path, 11))
    assert (model.max_batch_size, model.batching_verdict) == (32, "proved")
    assert (
        "model named: rows are independent, proved by its graph alone: it does not run on random"
        in caplog.text
    )
    assert model.batcher.submit_rows({"x": fp32(3, 22)}).result(30)["y"].shape == (3, 2)


def test_limits_that_no_full_batch_fits_give_warnings(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    model = load(small.twice, max_batch_size=8, max_queue_size=5, max_queue_bytes=50, slo=1e-9)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("no batch can have more than 5 rows" in text for text in warnings)
    assert any(
        "so a batch of 8 rows never fits --max-queue-bytes, which is 50: raise it" in text
        for text in warnings
    )
    assert any("--slo-ms is 1e-06: batches will have fewer rows" in text for text in warnings)
    assert any("no batch can have more than 5 rows" in text for text in model.batcher.statistics().warnings)


def test_a_closed_model_keeps_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its threads and memory would stay until the cycle collector runs, which may be never."""
    sessions: list[weakref.ref[Session]] = []
    make = Session.__init__

    def noted(session: Session, *arguments: Any, **options: Any) -> None:
        sessions.append(weakref.ref(session))
        make(session, *arguments, **options)

    monkeypatch.setattr(Session, "__init__", noted)
    source = ModelSource("m", small.twice(tmp_path / "m.onnx"))
    watchdog = Watchdog(0.1)
    gc.collect()
    gc.disable()
    try:
        model = loader.load_model(source, LoadContext(ServerConfig((source,)), watchdog=watchdog))
        assert model.batcher.submit({"x": np.ones(3, np.float32)}).result(PATIENCE)["y"].tolist() == [2, 2, 2]
        assert model.batcher.close()
        del model
        # Its thread may hold an instance for a moment.
        watchdog.close()
        assert sessions
        assert [session() for session in sessions] == [None] * len(sessions)
    finally:
        gc.enable()
        watchdog.close()


def test_a_load_that_fails_leaves_no_worker(tmp_path: Path) -> None:
    config = parse_config(
        'output { name: "y" data_type: TYPE_FP32 dims: 3 label_filename: "missing" }', "test"
    )
    source = ModelSource("leaves-none", small.twice(tmp_path / "m.onnx"), config=config, directory=tmp_path)
    with pytest.raises(StartError, match="'missing', which cannot be read"):
        loader.load_model(source, LoadContext(ServerConfig(())))
    assert not [thread for thread in threading.enumerate() if "leaves-none" in thread.name]


def test_a_trial_run_that_cannot_be_ended_is_left_and_named(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(Session, "_run_once", lambda self, inputs: ended.wait())
    with pytest.raises(
        StartError, match=r"a trial run of \S+\.onnx on x \[1, 3\] did not end within 0\.05 s"
    ):
        load(small.twice, run_timeout=0.05)
    assert "and cannot be ended: its thread stays until the process ends" in caplog.text
    assert loads_still_run()
    ended.set()
    until(loads_still_run, lambda runs: not runs)


@pytest.mark.parametrize("changed", ["m.onnx", "weights"])
def test_a_model_whose_files_are_replaced_while_it_is_loaded_is_refused(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session has the old files, and the check of its batches reads the new ones. So it is without a cache, too."""
    source = ModelSource("m", tmp_path / "m.onnx")
    external.scaled(source.path, 2, "weights")
    (tmp_path / "new").write_bytes((tmp_path / changed).read_bytes())

    def replaced(path: Path, *options: Any) -> Session:
        session = Session(path, *options)
        (tmp_path / "new").rename(tmp_path / changed)
        return session

    monkeypatch.setattr(check_cache, "cache_directory", lambda: None)
    monkeypatch.setattr(fp16, "Session", replaced)
    with pytest.raises(
        StartError, match=r"m\.onnx: its files have changed while it was loaded; load it again"
    ):
        loader.load_model(source, LoadContext(ServerConfig((source,))))
