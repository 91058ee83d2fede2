"""A request's memory is used again once nothing refers to it: no batch reads it after that."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import Recorder

from tensorferry.batcher import Batcher, InstanceFailed, OutOfMemory, Pipeline, Request, Stage, Tensor
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

FLOAT = np.dtype(np.float64)
# What another client writes into memory that was given back.
FOREIGN = -5000.0
SHARED = 100.0


class Borrowed:
    """Memory of a tensor. Its owner gives it to another client when the last reference to `data` is gone."""

    def __init__(self, *values: float) -> None:
        memory = np.array(values, FLOAT)
        root = (ctypes.c_ubyte * memory.nbytes).from_buffer(memory.data)
        weakref.finalize(root, memory.fill, FOREIGN)
        self._root = weakref.ref(root)
        self.data: Any = memoryview(root).cast("B")

    def lend(self) -> Any:
        """Return the only reference to the memory."""
        data, self.data = self.data, None
        return data

    @property
    def given_back(self) -> bool:
        return self._root() is None


def request_of(*values: float) -> tuple[Request, Recorder, Sequence[Borrowed]]:
    """A request of these rows, and a shared input, both in borrowed memory."""
    x, shared, recorder = Borrowed(*values), Borrowed(SHARED), Recorder()
    tensors = (Tensor(FLOAT, (len(values),), x.lend()), Tensor(FLOAT, (1,), shared.lend()))
    request = Request(
        tensors,
        recorder,
        names=("x", "s"),
        rows=len(values),
        nbytes=8 * len(values),
        key="all",
        shared=frozenset([1]),
    )
    return request, recorder, (x, shared)


class CancelAtStart:
    """A batcher's `batch_started`, which cancels a request just before the join of a batch, or part of one, of its rows."""

    def __init__(self, start: int) -> None:
        self._left = start
        self.victim: Request | None = None
        self.cancel: Callable[[Request], bool] = lambda request: False
        self.ended = False

    def __call__(self, batch: Sequence[Request]) -> None:
        if self.victim is not None and any(request.owner is self for request in batch):
            self._left -= 1
            if not self._left:
                self.ended = self.cancel(self.victim)


def add(inputs: Any) -> Any:
    return inputs["x"] + inputs["s"][0]


def fails_first(error: type[Exception]) -> Callable[[Any], Any]:
    """The model, whose runs of more than two rows fail."""

    def fails(inputs: Any) -> Any:
        if len(inputs["x"]) > 2:
            raise error("more than two rows")
        return add(inputs)

    return fails


def fails_once() -> Callable[[Any], Any]:
    failures = [InstanceFailed("the device failed")]

    def fails(inputs: Any) -> Any:
        if inputs["x"].any() and failures:
            raise failures.pop()
        return add(inputs)

    return fails


@pytest.mark.parametrize(
    ("model", "victim", "neighbours", "start", "sizes"),
    [
        (add, [1], [2, 3], 1, [3]),
        (fails_first(ValueError), [1], [2, 3, 4], 2, [4, 2, 2]),
        (fails_first(OutOfMemory), [1], [2, 3, 4], 2, [4, 2, 2]),
        (fails_first(OutOfMemory), [1, 2, 3, 4], [], 3, [4, 2, 2]),
        (add, [1, 2, 3, 4, 5, 6], [7, 8], 2, [4, 4]),
        (fails_once(), [1], [2, 3], 2, [3, 3]),
    ],
    ids=["dispatch", "bisect", "out of memory", "rows of one request", "split", "requeue"],
)
def test_a_cancelled_request_keeps_its_memory_while_a_batch_reads_it(
    make: Make,
    clock: VirtualClock,
    model: Callable[[Any], Any],
    victim: list[float],
    neighbours: list[float],
    start: int,
    sizes: list[int],
) -> None:
    hook = CancelAtStart(start)
    runner = ScriptedRunner(model, gated=True)
    batcher = make(runner, 4, clock=clock, batch_started=hook)
    occupying, _, _ = request_of(0.0)
    batcher.enqueue(occupying)
    runner.await_batches(1)
    cancelled, recorder, memory = request_of(*victim)
    cancelled.owner, hook.victim, hook.cancel = hook, cancelled, batcher.cancel
    batcher.enqueue(cancelled)
    recorders = []
    for value in neighbours:
        request, other, _ = request_of(value)
        batcher.enqueue(request)
        recorders.append(other)
    runner.open()
    answered = [other.await_outcome().outputs.tolist() for other in recorders]
    assert answered == [[value + SHARED] for value in neighbours]
    recorder.await_outcome()
    clock.await_sleepers()
    assert hook.ended
    assert recorder.kind == "Cancelled"
    assert [len(batch["x"]) for batch in runner.batches[1:]] == sizes, (
        "with the rows of the cancelled request"
    )
    assert not any(FOREIGN in array for batch in runner.batches for array in batch.values())
    assert all(each.given_back for each in memory), "the last reader is done"


def test_a_cancelled_request_keeps_its_memory_in_every_stage_of_a_pipeline(clock: VirtualClock) -> None:
    """The second stage reads inputs of the request, and what the first one returned."""
    hook, returned = CancelAtStart(1), []

    def first(inputs: Any) -> Any:
        returned.append(Borrowed(*inputs["x"] * 2))
        return {"h": np.frombuffer(returned[-1].lend(), FLOAT)}

    def second(inputs: Any) -> Any:
        return {"y": add({"x": inputs["h"] + inputs["x"], "s": inputs["s"]})}

    before, runner = ScriptedRunner(first, gated=True), ScriptedRunner(second)
    stages = [
        Stage("first", Batcher(before, 4, clock=clock), {"x": "x"}, {"h": "h"}),
        Stage(
            "second",
            Batcher(runner, 4, clock=clock, batch_started=hook),
            {"h": "h", "x": "x", "s": "s"},
            {"y": "y"},
            shared=frozenset(["s"]),
        ),
    ]
    with Pipeline("both", stages, inputs=["x", "s"], outputs=["y"], clock=clock) as pipeline:
        occupying, _, _ = request_of(0.0)
        pipeline.enqueue(occupying)
        before.await_batches(1)
        cancelled, recorder, memory = request_of(1.0)
        cancelled.owner, hook.victim, hook.cancel = hook, cancelled, pipeline.cancel
        pipeline.enqueue(cancelled)
        neighbour, other, _ = request_of(2.0)
        pipeline.enqueue(neighbour)
        before.open()
        assert other.await_outcome().outputs["y"].tolist() == [6.0 + SHARED]
        assert hook.ended
        assert recorder.kind == "Cancelled"
        assert sum([len(batch["x"]) for batch in runner.batches]) == 3, (
            "with the row of the cancelled request"
        )
        other.outcomes.clear()
        clock.await_sleepers(2)
        assert not any(FOREIGN in array for batch in runner.batches for array in batch.values())
        assert all(each.given_back for each in (*memory, *returned))
