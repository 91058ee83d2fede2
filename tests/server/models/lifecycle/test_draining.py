"""The end of a server whose models need each other: accepted requests are answered."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polling import until
from support.server.calling_models import World
from support.server.rig import PATIENCE, Replies, request, response_of, signature, spec

from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.app import App
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import NotReadyError
from tensorferry.server.models.lifecycle.unloading import wait_until_idle
from tensorferry.serving import FP32, infer, model, submit

VECTOR = signature(spec("x", "FP32", "batch"), outputs=(spec("y", "FP32", "batch"),))
X = np.ones(1, np.float32)


class Gate:
    """A function of rows that waits, once its test has begun, before it calls another model."""

    def __init__(self, other: str) -> None:
        self.started, self.opened = threading.Event(), threading.Event()
        self._other = other

    def __call__(self, x: Any) -> Any:
        self.started.set()
        assert self.opened.wait(PATIENCE)
        return infer(self._other, x=[x])["y"][0]


def function(name: str, run: Callable[[Any], Any], **options: Any) -> Any:
    return model(inputs={"x": FP32[()]}, outputs={"y": FP32[()]}, name=name, batched=False, **options)(run)


@pytest.fixture
def serve() -> Iterator[Callable[..., App]]:
    apps: list[App] = []

    def start(*declared: Any, **options: Any) -> App:
        sources = tuple(ModelSource(one.name, Path("app.py"), declaration=one) for one in declared)
        app = App(ServerConfig(sources, port=0, device="cpu", **options))
        apps.append(app)
        app.start()
        app.load()
        return app

    yield start
    for app in apps:
        assert app.stop()


def send(app: App, name: str) -> Replies:
    replies = Replies()
    data = request({"x": X}, model=name).SerializeToString()
    app.service.submit(data, math.inf, replies)
    return replies


def value(replies: Replies) -> float:
    return float(np.frombuffer(response_of(replies.first()).raw_output_contents[0], "<f4")[0])


def drained(app: App, during: Callable[[], None]) -> bool:
    """Drain the server, and do something once it refuses requests."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(app.drain()))
    thread.start()
    assert until(lambda: app.service.draining)
    during()
    thread.join(PATIENCE)
    return found[0]


def test_a_function_that_runs_can_still_call_a_model_that_sorts_before_it(serve: Callable[..., App]) -> None:
    gate = Gate("a")
    gate.opened.set()
    app = serve(function("z", gate), function("a", lambda x: 2 * x))
    gate.opened.clear()
    gate.started.clear()
    running = send(app, "z")
    assert gate.started.wait(PATIENCE)
    queued = send(app, "z")
    refused: list[Replies] = []

    def during() -> None:
        refused.append(send(app, "a"))
        gate.opened.set()

    assert drained(app, during)
    assert [value(running), value(queued)] == [2, 2]
    with pytest.raises(NotReadyError):
        response_of(refused[0].first())


def test_draining_waits_for_no_window_of_a_called_model(serve: Callable[..., App]) -> None:
    gate = Gate("a")
    gate.opened.set()
    called = model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, name="a")(lambda x: 2 * x)
    app = serve(function("z", gate), called, max_queue_delay=3600.0)
    running = send(app, "z")
    assert drained(app, lambda: None)
    assert value(running) == 2


def test_stopping_ends_a_function_that_waits_for_another_model(serve: Callable[..., App]) -> None:
    gate = Gate("z")
    gate.opened.set()
    called = model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, name="z")(lambda x: 2 * x)
    app = serve(function("a", gate), called, max_queue_delay=3600.0)
    gate.started.clear()
    running = send(app, "a")
    assert gate.started.wait(PATIENCE)
    batcher = app.registry.get("z").batcher
    assert until(lambda: batcher.statistics().sizes.queued == 1)
    assert app.stop()
    with pytest.raises(Exception, match="closed"):
        response_of(running.first())


def test_what_a_function_leaves_running_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    runner = ScriptedRunner(lambda inputs: {"y": inputs["x"]}, gated=True)
    world.add("a", runner, VECTOR)
    opened = threading.Event()
    opened.set()

    def leaves(x: Any) -> Any:
        assert opened.wait(PATIENCE)
        submit("a", x=x)
        runner.await_batches(1)
        return x

    world.load(model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, name="z")(leaves))
    opened.clear()
    replies = Replies()
    world.service.submit(request({"x": X}, model="z").SerializeToString(), math.inf, replies)
    passed: list[str] = []
    models = world.registry.models()
    for each, action in zip(models, (runner.open, opened.set), strict=True):

        def wait(
            timeout: float, wait: Any = each.batcher.wait_idle, each: Any = each, action: Any = action
        ) -> Any:
            passed.append(each.name)
            # The function runs on after the first model was found idle; what it left ends in the second pass.
            if each.name == "z" or passed.count("a") == 2:
                action()
            return wait(timeout)

        monkeypatch.setattr(each.batcher, "wait_idle", wait)
    assert wait_until_idle(models, time.monotonic() + PATIENCE)
    assert passed == ["a", "z"] * 2
    assert response_of(replies.first()).model_name == "z"
    world.close()


def test_it_waits_only_so_long() -> None:
    world = World()
    runner = ScriptedRunner(lambda inputs: {"y": inputs["x"]}, gated=True)
    world.add("a", runner, VECTOR)
    replies = Replies()
    world.service.submit(request({"x": X}, model="a").SerializeToString(), math.inf, replies)
    runner.await_batches(1)
    assert not wait_until_idle(world.registry.models(), time.monotonic())
    runner.open()
    assert wait_until_idle(world.registry.models(), math.inf)
    assert response_of(replies.first()).model_name == "a"
    world.close()
