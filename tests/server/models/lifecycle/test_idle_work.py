"""An idle model is compared to the end, and measured with `--instances auto`, and then serves as was found best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polling import PATIENCE, until
from support.models import mixing, small
from support.server.rig import fp32, infer, request

from tensorferry.protos.model_config_pb2 import ModelConfig, ModelInstanceGroup
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.idle_work import IdleWork
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.onnx.loading import chosen_layout
from tensorferry.server.onnx.measuring.core_layouts import LayoutTime
from tensorferry.server.onnx.measuring.measurements import Measurements
from tensorferry.server.onnx.measuring.measuring_child import MeasuredModel
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.serving import pipeline

AUTO = ServerConfig(models=(), device="cpu", instances=None)
ONE = ServerConfig(models=(), device="cpu")


class Server:
    """A server of one model, with four cores, which two sessions use `gain` times as well as one."""

    def __init__(
        self,
        path: Path,
        config: ServerConfig = AUTO,
        gain: float = 1.5,
        new_budget: Callable[[], LoadBudget] = LoadBudget,
    ) -> None:
        self.registry = ModelRegistry()
        self.source = ModelSource("m", path)
        self.context = LoadContext(config)
        self.gain = gain
        self.measured: list[MeasuredModel] = []
        self.while_measured: Callable[[], object] = lambda: None
        self.while_loaded: Callable[[], object] = lambda: None
        self.loaded: list[Model] = []
        self.replaced: list[Model] = []
        self.idle = IdleWork(config, self.registry, self.load, self._replace, self._measure, 0.001)
        self.registry.mark_ready(self.load(self.source, new_budget))
        self.registry.mark_complete()

    @property
    def model(self) -> Model:
        return self.registry.get("m")

    def load(self, source: ModelSource, new_budget: Callable[[], LoadBudget] = LoadBudget) -> Model:
        self.while_loaded()
        model = load_model(source, replace(self.context, new_budget=new_budget))
        self.idle.add(model)
        self.loaded.append(model)
        return model

    def _measure(self, model: MeasuredModel, on_start: Any) -> Measurements:
        self.measured.append(model)
        self.while_measured()
        rates = (100.0, 100 * self.gain, 90.0)
        times = [
            LayoutTime(each.sessions, each.threads, 8, rate, 0.01)
            for each, rate in zip(model.layouts, rates, strict=True)
        ]
        return Measurements(("cpu",), (), layouts=tuple(times))

    def _replace(self, before: Model, model: Model) -> bool:
        self.replaced.append(before)
        return self.registry.replace(before, model)

    def close(self) -> None:
        self.idle.end()
        assert self.idle.close(PATIENCE)
        for model in (*self.replaced, self.model):
            model.batcher.close()
            model.release()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(chosen_layout, "usable_cores", lambda: 4)
    servers: list[Server] = []

    def serve(
        dims: tuple[str, int | str] = ("batch", 3),
        *,
        make: Callable[[Path], Path] | None = None,
        **options: Any,
    ) -> Server:
        path = tmp_path / "m.onnx"
        servers.append(Server(make(path) if make is not None else small.twice(path, dims), **options))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def threads_of(model: MeasuredModel) -> list[tuple[int, int]]:
    return [(each.sessions, each.threads) for each in model.layouts]


def no_time() -> LoadBudget:
    """Return the budget of a model that is too slow for a comparison."""
    return LoadBudget(clock=count(step=100).__next__)


def test_a_comparison_that_takes_longer_than_a_load_may_is_finished_while_the_server_is_idle(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = serve(make=mixing.hashed, config=ONE, new_budget=no_time)
    assert (server.model.batching_verdict, server.model.max_batch_size) == ("refused", 0)
    server.idle.start()
    until(lambda: server.model.batching_verdict == "tested")
    assert server.model.max_batch_size == 32
    assert (
        "its checks were finished while the server was idle: batches of up to 32 rows (tested)" in caplog.text
    )
    assert len(server.loaded) == 2


def test_a_comparison_is_given_up_for_requests_and_finished_later(serve: Callable[..., Server]) -> None:
    server = serve(make=mixing.hashed, config=ONE, new_budget=no_time)

    def one_request() -> None:
        if len(server.loaded) == 1:
            server.model.batcher.submit({"x": np.ones(1, np.int32)}).result(30)

    server.while_loaded = one_request
    server.idle.start()
    until(lambda: server.model.batching_verdict == "tested")
    assert [model.batching_verdict for model in server.loaded] == ["refused", "refused", "tested"]


def test_a_model_stays_if_steps_of_another_could_not_use_what_was_found(
    serve: Callable[..., Server], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(make=mixing.hashed, config=ONE, new_budget=no_time)
    source = ModelSource("p", tmp_path / "app.py", declaration=pipeline("p", "m", outputs=["y"]))
    user = load_model(source, replace(server.context, registry=server.registry))
    server.registry.mark_ready(user)
    server.idle.start()
    until(lambda: "steps of model 'p' could not use it any more: it has an axis of rows now" in caplog.text)
    assert server.registry.serves("p")
    assert server.replaced == []
    user.batcher.close()


def test_a_model_stays_if_its_files_have_changed(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    """An operator who writes a new file decides when it is loaded."""
    server = serve(make=mixing.hashed, config=ONE, new_budget=no_time)
    small.twice(server.source.path)
    server.idle.start()
    until(lambda: "its files have changed since it was loaded" in caplog.text)
    assert server.replaced == []


def test_work_goes_on_after_an_error_of_the_system(serve: Callable[..., Server]) -> None:
    server = serve(make=mixing.hashed, config=ONE, new_budget=no_time)
    server.idle.add(server.model)
    errors = [OSError(24, "Too many open files")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    server.while_loaded = fail_once
    server.idle.start()
    until(lambda: server.model.batching_verdict == "tested")


def test_a_better_layout_serves_and_later_loads_use_it_at_once(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = serve()
    assert server.model.devices == ("cpu",)
    server.idle.start()
    until(lambda: server.model.devices == ("cpu", "cpu"))
    answer = server.model.batcher.submit_rows({"x": np.ones((1, 3), np.float32)}).result(30)
    assert answer["y"].tolist() == [[2, 2, 2]]
    assert [threads_of(model) for model in server.measured] == [[(1, 4), (2, 2), (4, 1)]]
    # The line comes after the replacement that the answer shows.
    until(lambda: "2 sessions of 2 threads carry 1.50 times the rows of one session" in caplog.text)
    again = serve()
    assert (again.model.devices, again.measured) == (("cpu", "cpu"), [])


def test_one_session_stays_if_no_layout_is_clearly_better(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = serve(gain=1.05)
    server.idle.start()
    until(lambda: "keeps one session" in caplog.text)
    assert (server.model.devices, server.replaced) == (("cpu",), [])
    assert len(server.measured) == 1


def test_a_measurement_during_which_requests_came_is_repeated(serve: Callable[..., Server]) -> None:
    server = serve()

    def one_request() -> None:
        if len(server.measured) == 1:
            server.model.batcher.submit_rows({"x": np.ones((1, 3), np.float32)}).result(30)

    server.while_measured = one_request
    server.idle.start()
    until(lambda: server.model.devices == ("cpu", "cpu"))
    assert len(server.measured) == 2


def test_a_model_with_variable_axes_is_measured_with_the_lengths_of_its_last_request(
    serve: Callable[..., Server],
) -> None:
    server = serve(dims=("batch", "width"))
    server.idle.start()
    infer(InferenceService(server.registry), request({"x": fp32(1, 7)}))
    until(lambda: server.measured)
    assert server.measured[0].lengths == {"width": 7}


def test_lengths_of_tensors_whose_batch_axis_is_not_the_first_are_known(serve: Callable[..., Server]) -> None:
    text = "(float[1, 3] x, float[len, 1, 3] state) => (float[len, 1, 3] y) { sum = CumSum (state, zero) y = Add (x, sum) }"
    server = serve(make=lambda path: small.written(path, text, zero=0))
    assert server.model.signature.batch_axes == {"state": 1, "y": 1}
    server.idle.start()
    infer(InferenceService(server.registry), request({"x": fp32(1, 3), "state": fp32(7, 1, 3)}))
    until(lambda: server.measured)
    assert server.measured[0].lengths == {"len": 7}


def test_a_model_that_was_replaced_meanwhile_stays(serve: Callable[..., Server]) -> None:
    server = serve()
    first, newer = server.model, server.load(server.source)
    server.while_measured = lambda: server.registry.mark_ready(newer)
    server.idle.start()
    until(lambda: server.replaced)
    server.idle.end()
    assert server.idle.close(PATIENCE)
    assert server.model is newer
    first.batcher.close()


def test_a_model_that_was_replaced_before_it_was_measured_does_not_serve_again(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve()
    first = server.model
    server.registry.mark_ready(server.load(ModelSource("m", small.centred(tmp_path / "centred.onnx"))))
    server.idle.start()
    until(lambda: server.model.devices == ("cpu", "cpu"))
    answer = server.model.batcher.submit_rows({"x": np.ones((1, 3), np.float32)}).result(30)
    assert answer["y"].tolist() == [[0, 0, 0]]
    first.batcher.close()


@pytest.mark.parametrize(
    ("config", "given"),
    [
        pytest.param(ServerConfig(models=(), device="cpu"), None, id="not-auto"),
        pytest.param(ServerConfig(models=(), device="cpu", instances=None, threads=1), None, id="threads"),
        pytest.param(AUTO, ModelConfig(instance_group=[ModelInstanceGroup(count=1)]), id="instance_group"),
    ],
)
def test_nothing_is_measured_where_the_operator_has_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: ServerConfig, given: ModelConfig | None
) -> None:
    monkeypatch.setattr(chosen_layout, "usable_cores", lambda: 4)
    source = ModelSource("m", small.twice(tmp_path / "m.onnx"), config=given)
    model = load_model(source, LoadContext(config))
    model.batcher.close()
    model.release()
    assert (model.open_layout, model.open_checks) == (None, None)
