"""Functions that call other models: through their batchers, with the deadline, client and trace of the batch."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
from polling import until
from support.server.calling_models import Observed, World, request
from support.server.rig import Replies, infer, response_of, signature, spec
from support.server.rig import request as message

from tensorferry.batcher import (
    DeadlineExceeded,
    OutOfMemory,
    QueueFull,
    RunTimedOut,
    StatefulBatcher,
    StateTensor,
)
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.errors import (
    InvalidRequestError,
    LimitError,
    NotReadyError,
    StepFailedError,
)
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.status import StatusCode, status_of
from tensorferry.serving import FP32, InvalidInput, model, submit
from tensorferry.serving import infer as call

VECTOR = signature(spec("x", "FP32", "batch"), outputs=(spec("y", "FP32", "batch"),))
X = np.arange(3, dtype=np.float32)


def double(inputs: Mapping[str, Any]) -> Any:
    return {"y": inputs["x"] * 2}


def caller(function: Any, name: str = "caller", **options: Any) -> Any:
    """Declare a function from x to y as a model."""
    return model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, name=name, **options)(function)


def test_calls_share_batches_with_each_other_and_with_clients(world: World) -> None:
    runner = ScriptedRunner(double, gated=True)
    world.add("m", runner, VECTOR)
    with world.caller("caller"):
        first = submit("m", x=X)
        runner.await_batches(1)
        replies = Replies()
        world.service.submit(message({"x": X}).SerializeToString(), math.inf, replies)
        others = [submit("m", {"x": X[:1]}) for _ in range(2)]
        runner.open()
        assert first.result()["y"].tolist() == [0, 2, 4]
        assert [other.result()["y"].tolist() for other in others] == [[0], [0]]
    assert len(response_of(replies.first()).outputs) == 1
    assert [len(batch["x"]) for batch in runner.batches] == [3, 5]


def test_a_version_can_be_asked_for(world: World) -> None:
    world.add("m", double, VECTOR)
    world.add("m", lambda inputs: {"y": -inputs["x"]}, VECTOR, version="2")
    assert world.call("m", {"x": X}, version="1")["y"].tolist() == [0, 2, 4]
    assert world.call("m", {"x": X})["y"].tolist() == [0, -1, -2]


def test_a_model_with_states_is_not_called(world: World) -> None:
    state = StateTensor("past", "next", np.zeros((1,), np.float32))
    with StatefulBatcher(double, [state]) as batcher:
        world.registry.mark_ready(Model("m", "1", VECTOR, 8, "", batcher))
        with pytest.raises(InvalidInput, match="model 'm' keeps states of sequences"):
            world.call("m", {"x": X[:1]})


def test_a_call_has_the_latest_deadline_of_its_batch(world: World) -> None:
    seen = Observed(double)
    world.add("m", seen, VECTOR)
    now = time.monotonic()
    early, late, ended = request(now + 1e3), request(now + 2e3), request(now - 1)
    world.call("m", {"x": X}, ended, early, late)
    world.call("m", {"x": X}, early, late, timeout=5e3)
    world.call("m", {"x": X}, early, late, timeout=500)
    world.call("m", {"x": X}, early, request())
    deadlines = [batch[0].deadline for batch in seen.batches]
    assert deadlines[:2] == [late.deadline] * 2
    assert now + 500 <= deadlines[2] < late.deadline
    assert deadlines[3] == math.inf


def test_nothing_is_called_for_requests_that_have_ended(world: World) -> None:
    seen = Observed(double)
    world.add("m", seen, VECTOR)
    with pytest.raises(DeadlineExceeded, match="before model 'caller' called model 'm'"):
        world.call("m", {"x": X}, request(time.monotonic() - 1))
    assert seen.batches == []


def test_a_call_has_the_client_priority_and_id_of_the_first_request(world: World) -> None:
    seen = Observed(double)
    world.add("m", seen, VECTOR, priority_weights=(2, 1))
    first, other = request(client="anna", priority=1, tag="id-1"), request(client="ben", priority=2)
    world.call("m", {"x": X}, first, other)
    world.call("m", {"x": X}, request(priority=7))
    called, unknown = (batch[0] for batch in seen.batches)
    assert (called.client, called.priority, called.tag) == ("anna", 1, "id-1")
    # A class that the model does not have means its default.
    assert unknown.priority == world.registry.get("m").batcher.priorities


def raising(error: BaseException) -> Any:
    def run(inputs: Any) -> Any:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InvalidRequestError("no"), InvalidInput, StatusCode.INVALID_ARGUMENT),
        (QueueFull("no", 0.5), QueueFull, StatusCode.RESOURCE_EXHAUSTED),
        (RunTimedOut("no"), RunTimedOut, StatusCode.DEADLINE_EXCEEDED),
        (OutOfMemory("no"), LimitError, StatusCode.RESOURCE_EXHAUSTED),
        (StepFailedError("no", "secret"), StepFailedError, StatusCode.INTERNAL),
        (ZeroDivisionError("secret"), StepFailedError, StatusCode.INTERNAL),
    ],
)
def test_an_error_has_a_type_for_the_function_and_the_same_status_for_its_client(
    world: World, caplog: pytest.LogCaptureFixture, error: BaseException, kind: Any, code: StatusCode
) -> None:
    world.add("m", raising(error), VECTOR)
    caught: list[BaseException] = []

    def function(x: Any) -> Any:
        try:
            return call("m", x=x)["y"]
        except Exception as found:
            caught.append(found)
            raise

    world.load(caller(function))
    caught.clear()
    with pytest.raises(Exception) as failed:  # noqa: PT011
        infer(world.service, message({"x": X}, model="caller"))
    assert type(caught[0]) is kind
    status = status_of(failed.value)
    assert status.code is code
    assert "secret" not in status.message
    if kind is StepFailedError:
        assert status.message.startswith("model 'caller' called model 'm', which failed: ")


def test_a_batch_whose_call_is_not_accepted_runs_once(world: World) -> None:
    gate, rows = threading.Event(), []

    def function(x: Any) -> Any:
        assert gate.wait(30)
        rows.append(len(x))
        if len(rows) == 1:
            return x
        return call("m", x=x)["y"]

    gate.set()
    served = world.load(caller(function))
    world.add("m", raising(QueueFull("no", 0.5)), VECTOR)
    gate.clear()
    rows.clear()
    replies = [Replies() for _ in range(6)]
    data = message({"x": X[:1]}, model="caller").SerializeToString()
    world.service.submit(data, math.inf, replies[0])
    assert until(lambda: served.batcher.statistics().sizes.running == 1)
    for reply in replies[1:]:
        world.service.submit(data, math.inf, reply)
    gate.set()
    assert response_of(replies[0].first()).raw_output_contents
    for reply in replies[1:]:
        with pytest.raises(QueueFull, match="no"):
            response_of(reply.first())
    assert rows == [1, 5]


@pytest.mark.parametrize("replaced", [True, False])
def test_a_model_that_goes_after_the_look_up_is_looked_up_again(
    world: World, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    old = world.add("m", double, VECTOR)
    enqueue = old.batcher.enqueue

    def go(given: Any, **options: Any) -> bool:
        if replaced:
            world.add("m", lambda inputs: {"y": -inputs["x"]}, VECTOR)
        else:
            world.registry.mark_unloading(old)
        old.batcher.close()
        return enqueue(given, **options)

    monkeypatch.setattr(old.batcher, "enqueue", go)
    if replaced:
        assert world.call("m", {"x": X})["y"].tolist() == [0, -1, -2]
    else:
        with pytest.raises(NotReadyError):
            world.call("m", {"x": X})


def test_calls_are_cancelled_when_the_function_has_returned(world: World) -> None:
    runner = ScriptedRunner(double, gated=True)
    world.add("m", runner, VECTOR)
    with world.caller("caller"):
        running = submit("m", x=X)
        runner.await_batches(1)
        queued = submit("m", x=X)
        context = copy_context()
    for future in (running, queued):
        with pytest.raises(CancelledError):
            future.result()
    with pytest.raises(RuntimeError, match="after the function had returned"):
        context.run(submit, "m", x=X)
    runner.open()
    assert world.registry.get("m").batcher.drain()
    assert len(runner.batches) == 1


def test_a_thread_of_the_function_calls_in_a_copy_of_its_context(world: World) -> None:
    world.add("m", double, VECTOR)
    found: list[Any] = []
    with world.caller("caller"):
        context = copy_context()
        thread = threading.Thread(target=lambda: found.append(context.run(call, "m", x=X)["y"].tolist()))
        thread.start()
        thread.join()
    assert found == [[0, 2, 4]]
    with pytest.raises(RuntimeError, match="outside of a model's function"):
        call("m", x=X)


def test_a_rejected_call_keeps_nothing_alive(world: World) -> None:
    world.add("m", double, VECTOR, max_queue_size=2)
    x = np.zeros(4, np.float32)
    alive = weakref.ref(x)
    gc.disable()
    try:
        with world.caller("caller"):
            error = submit("m", x=x).exception()
            assert isinstance(error, InvalidInput)
            error.__traceback__ = None
        del x
        assert alive() is None
    finally:
        gc.enable()
