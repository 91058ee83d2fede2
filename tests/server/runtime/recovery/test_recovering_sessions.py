"""Ending and rebuilding of sessions that are staged, captured or in FP16, with the CPU as the device."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polling import until
from support.models import small
from support.server.cpu_as_device import CountingDeviceMemory
from support.server.rig import PATIENCE, Array, Load, fp32

from tensorferry.batcher import Batcher, InstanceFailed, Tensor
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.models.lifecycle import stages
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.models.repository.repository import Repository
from tensorferry.server.models.repository.repository_control import RepositoryController
from tensorferry.server.onnx.loading.session_factory import SessionFactory
from tensorferry.server.runtime.recovery import recovering_instance
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.server.runtime.recovery.recovering_instance import RecoveringInstance, RecoveringStagedModel
from tensorferry.server.runtime.recovery.watchdog import Watchdog
from tensorferry.server.runtime.session import Session

BROKEN = "CUDA failure 700: cudaErrorIllegalAddress"
KINDS: dict[str, dict[str, Any]] = {"staged": {}, "all": {"fp16": True, "cuda_graphs": ()}}


class Faults:
    """Breaks the next `armed` sessions that run. `runs` lists the number of the session and of the graph of each run."""

    def __init__(self) -> None:
        self.armed = 0
        self.sessions: list[Session] = []
        self.broken: set[int] = set()
        self.runs: list[tuple[int, int | None]] = []
        self.original = Session._run_bound

    def run_bound(self, session: Session, binding: Any, graph: int | None) -> None:
        if session not in self.sessions:
            self.sessions.append(session)
        number = self.sessions.index(session)
        if self.armed:
            self.armed -= 1
            self.broken.add(number)
        if number in self.broken:
            raise RuntimeError(BROKEN)
        self.runs.append((number, graph))
        self.original(session, binding, graph)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    script = Faults()
    monkeypatch.setattr(
        Session, "_run_bound", lambda session, binding, graph: script.run_bound(session, binding, graph)
    )
    monkeypatch.setattr(recovering_instance, "_FIRST_SECONDS", 0.02)
    return script


@pytest.fixture
def load(tmp_path: Path, on_device: CountingDeviceMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Function that loads a model with the CPU as a pipelined device, under a watchdog."""
    monkeypatch.setattr(
        stages,
        "Batcher",
        lambda *given, **options: Batcher(*given, **{**options, "pipelined": True, "steady": False}),
    )
    loaded: list[Model] = []
    watchdog = Watchdog(0.05)

    def make(build: Callable[[Path], Path], **options: Any) -> Model:
        source = ModelSource("m", build(tmp_path / "m.onnx"))
        config = ServerConfig((source,), max_batch_size=2, **options)
        loaded.append(load_model(source, LoadContext(config, watchdog=watchdog)))
        return loaded[-1]

    yield make
    watchdog.close()
    for model in loaded:
        assert model.batcher.close(drain=False, timeout=PATIENCE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_session_is_rebuilt_with_the_same_options(
    kind: str, load: Load, faults: Faults, scratch: Path
) -> None:
    model = load(small.mlp, **KINDS[kind])
    (given,), (name,) = model.signature.inputs, [spec.name for spec in model.signature.outputs]
    inputs = {given.name: fp32(2, int(given.dims[1]))}
    before = model.batcher.submit_rows(inputs).result(PATIENCE)[name]
    old = len(faults.sessions)
    faults.armed = 1
    after = model.batcher.submit_rows(inputs).result(PATIENCE)[name]
    assert after.tobytes() == before.tobytes()
    number, graph = faults.runs[-1]
    assert number == old, "a new session ran it"
    assert (graph is not None) == ("cuda_graphs" in KINDS[kind])
    assert (faults.sessions[number].path.parent.parent == scratch) == ("fp16" in KINDS[kind])
    assert not list(scratch.iterdir()), "the converted file is removed"
    assert model.health.reason is None
    assert model.batcher.statistics().retried == 1


@pytest.mark.parametrize("step", ["run", "load", "fetch"])
def test_a_broken_session_is_freed_before_the_rebuild(
    step: str, load: Load, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a collection of cycles: objects that existed at the start of a server are never collected."""
    broken: list[weakref.ref[Any]] = []
    freed: list[bool] = []
    rebuild = SessionFactory.rebuild

    def looking(factory: SessionFactory, device: str, *, runs: bool) -> Session:
        faults.sessions.clear()
        freed.append(broken[0]() is None)
        return rebuild(factory, device, runs=runs)

    monkeypatch.setattr(SessionFactory, "rebuild", looking)
    model, x = load(small.twice), fp32(2, 3)
    # What ONNX Runtime holds.
    broken.append(weakref.ref(faults.sessions.pop()._session._sess))
    target: Any = faults if step == "run" else CountingDeviceMemory
    name = "original" if step == "run" else step
    works, fails = getattr(target, name), [True]

    def failing(*given: Any) -> Any:
        if fails:
            fails.pop()
            raise RuntimeError(BROKEN)
        return works(*given)

    monkeypatch.setattr(target, name, failing)
    gc.disable()
    try:
        assert model.batcher.submit_rows({"x": x}).result(PATIENCE)["y"].tolist() == (x * 2).tolist()
    finally:
        gc.enable()
    assert freed == [True]
    assert model.health.reason is None


def test_a_broken_session_is_not_rebuilt_from_a_file_that_was_replaced(
    load: Load, faults: Faults, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The new file may have other inputs, or mix rows."""
    model, path, x = load(small.twice), tmp_path / "m.onnx", fp32(2, 3)
    path.rename(tmp_path / "loaded")
    small.softmax_over_rows(path)
    faults.armed = 1
    with pytest.raises(InstanceFailed, match="tries to rebuild its session failed"):
        model.batcher.submit_rows({"x": x}).result(PATIENCE)
    assert "m.onnx: its files have changed since it was loaded; load it again" in caplog.text
    (tmp_path / "loaded").rename(path)
    until(lambda: model.health.reason is None)
    assert model.batcher.submit_rows({"x": x}).result(PATIENCE)["y"].tolist() == (x * 2).tolist()


def test_an_uploaded_model_is_rebuilt_from_its_files(
    tmp_path: Path, faults: Faults, scratch: Path, on_device: CountingDeviceMemory
) -> None:
    (tmp_path / "repository").mkdir()
    registry = ModelRegistry()
    control = RepositoryController(
        registry,
        Repository([tmp_path / "repository"]),
        lambda source: load_model(source, LoadContext(ServerConfig(()))),
        lambda name: None,
        mode="explicit",
        poll_seconds=3600.0,
    )
    control.start((), (), strict=True)
    content = small.twice(tmp_path / "m.onnx").read_bytes()
    control.load("m", ModelConfig(), {"1/model.onnx": content})
    old, x = len(faults.sessions), fp32(2, 3)
    faults.armed = 1
    answer = registry.get("m").batcher.submit_rows({"x": x}).result(PATIENCE)
    assert answer["y"].tolist() == (x * 2).tolist()
    assert len(faults.sessions) == old + 1
    faults.sessions.clear()
    control.unload("m")
    assert control.drain(time.monotonic() + PATIENCE)
    assert control.close(PATIENCE)
    gc.collect()
    assert not list(scratch.iterdir())


class TestBatchesOfABrokenSession:
    """Batches that are in the memory of a session when it is replaced."""

    @staticmethod
    def made(path: Path) -> RecoveringInstance:
        def session() -> Session:
            return Session(path, memory=CountingDeviceMemory())

        return RecoveringInstance(session(), session, InstanceHealth("m", "1"), 0)

    @pytest.fixture
    def instance(self, tmp_path: Path, faults: Faults) -> RecoveringInstance:
        return self.made(small.twice(tmp_path / "m.onnx"))

    @staticmethod
    def placed(steps: RecoveringStagedModel, x: Any) -> Any:
        batch = steps.place({"x": (x.dtype, x.shape)})
        assert batch is not None
        batch["x"][...] = x
        return batch

    @staticmethod
    def broken(
        instance: RecoveringInstance, faults: Faults, inputs: dict[str, Array] | None = None
    ) -> Callable[[], None]:
        faults.armed = 1
        with pytest.raises(InstanceFailed) as caught:
            instance.run(inputs or {"x": fp32(1, 3)})
        assert caught.value.recover is not None
        return caught.value.recover

    def test_loaded_batches_run_in_the_new_session(
        self, instance: RecoveringInstance, faults: Faults
    ) -> None:
        steps, x = RecoveringStagedModel(instance), fp32(2, 3)
        placed, loaded = self.placed(steps, x), steps.load(self.placed(steps, x))
        recover = self.broken(instance, faults)
        with pytest.raises(InstanceFailed, match="being rebuilt"):
            steps(loaded)
        assert steps.place({"x": (x.dtype, x.shape)}) is None
        recover()
        for batch in (loaded, steps.load(placed)):
            assert steps.fetch(steps(batch))["y"].tolist() == (x * 2).tolist()
            assert faults.runs[-1][0] == len(faults.sessions) - 1

    def test_a_state_of_the_old_session_goes_on_in_the_new_one(self, tmp_path: Path, faults: Faults) -> None:
        float32, width = np.dtype(np.float32), 40_000
        instance = self.made(small.totals(tmp_path / "m.onnx"))
        steps = RecoveringStagedModel(instance)
        steps.keep_states({"past": "next"})

        def loaded(*past: Any) -> Any:
            rows = len(past)
            batch = steps.place({"x": (float32, (rows, 1)), "past": (float32, (rows, width))})
            assert batch is not None
            batch["x"][...] = 1
            batch["past"].extend(Tensor(float32, (1, width), state) for state in past)
            return steps.load(batch)

        zeros = np.zeros((1, width), float32)
        (state,) = steps.fetch(steps(loaded(zeros)))["next"]
        left = loaded(state, zeros)
        self.broken(instance, faults, {"x": np.ones((1, 1), float32), "past": zeros})()
        for batch in (left, loaded(state, zeros)):
            assert steps.fetch(steps(batch))["y"].tolist() == [[2], [1]]

    def test_a_late_failure_of_a_copy_does_not_break_the_new_session(
        self, instance: RecoveringInstance, faults: Faults, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps, x = RecoveringStagedModel(instance), fp32(2, 3)
        computed = steps(steps.load(self.placed(steps, x)))
        self.broken(instance, faults)()

        def failing(*_: Any) -> None:
            raise RuntimeError(BROKEN)

        with monkeypatch.context() as patch:
            patch.setattr(CountingDeviceMemory, "fetch", failing)
            with pytest.raises(InstanceFailed) as caught:
                steps.fetch(computed)
        assert caught.value.recover is None
        assert instance.run({"x": x})["y"].tolist() == (x * 2).tolist()
