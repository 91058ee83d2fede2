"""One request alone leaves by one function: it gives the work that the dispatch would give, and leaves the same behind."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support.batcher.rig import Recorder

from tensorferry.batcher import DeadlineExceeded
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.learning.return_model import Returners
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, CloseReason
from tensorferry.batcher.settings import Limits, QueuePolicy
from tensorferry.batcher.testing import VirtualClock

MOST = 4
FIXED, PER_ROW = 1e-3, 1e-4


class World:
    """A queue of a device that is known to be fast; by `express` where that is possible, or never."""

    def __init__(
        self, *, express: bool, known: bool = True, limits: Limits | None = None, **options: Any
    ) -> None:
        self.express = express
        self.clock = VirtualClock(10.0)
        self.returners = Returners()
        self.queue = RequestQueue(
            limits or Limits(MOST, 0.0), 100, 1 << 20, self.clock, returners=self.returners, **options
        )
        for rows in (1, MOST) if known else ():
            self.queue.anchor(rows, FIXED + PER_ROW * rows)
        self.by_express = 0
        self.running: list[BatchAssignment] = []

    def put(self, tag: int, rows: int, width: int, patience: float) -> None:
        request = request_of(
            np.zeros((rows, width), np.float32),
            Recorder(),
            one_row=False,
            deadline=self.clock.now() + patience,
        )
        request.tag = tag
        with suppress(DeadlineExceeded):
            self.queue.put_quietly([request])

    def alone(self, most_seconds: float = 1.0) -> BatchAssignment | Wait | None:
        """What the express gives."""
        return self.queue._express.take(most_seconds, self.queue._devices.each[0], self.clock.now())

    def take(self) -> tuple[Any, ...]:
        """What leaves now, in words that compare."""
        step = self.alone() if self.express else None
        self.by_express += step is not None
        if step is None:
            step = self.queue.poll()
        if isinstance(step, Wait):
            return ("wait", step.until)
        assert step is not None
        self.running.append(step)
        return (
            [(request.tag, request.state, request.started, request.arrival) for request in step.batch],
            step.reason,
            [request.tag for request in step.expired],
            [request.tag for request in step.shed],
            step.predicted,
        )

    def finish(self, seconds: float, cancelled: bool) -> None:
        """The batch has run."""
        work = self.running.pop()
        if cancelled:
            self.queue.cancel(work.batch[0])
        self.queue.finish(work.batch)
        self.clock.advance(seconds)
        if not work.batch:
            seconds = math.nan
        self.queue.ran(work.batch, None if math.isnan(seconds) else seconds, 1e-5, 1e-5)

    def figures(self) -> tuple[Any, ...]:
        queue = self.queue
        device = queue._devices.each[0]
        bucket_figures, returners = queue.lessons.statistics()
        return (
            queue.sizes(),
            device.unanswered,
            device.idle,
            device.free_at(self.clock.now()),
            queue._ends.busy,
            queue._backlog.class_rows,
            {key: str(figures) for key, figures in bucket_figures.items()},
            returners,
        )


@pytest.mark.parametrize("seed", range(24))
def test_whatever_happens_it_says_what_the_dispatch_would(seed: int) -> None:
    chance = random.Random(seed)
    worlds = World(express=True), World(express=False)
    # Some with deadlines, some with two kinds of requests; most as they usually are.
    with_deadline, kinds = chance.random() < 0.4, 1 if chance.random() < 0.7 else 2
    for tag in range(150):
        gap, rows, width = (
            chance.choice([1e-5, 1e-4, 2e-3]),
            chance.randint(1, MOST),
            chance.randint(1, kinds),
        )
        patience = chance.choice([math.inf, 1e-3, 3e-3, 0.5]) if with_deadline else math.inf
        count = 1 if chance.random() < 0.8 else chance.randint(0, 3)
        ran, cancelled = chance.uniform(1e-4, 3e-3), chance.random() < 0.1
        said = []
        for world in worlds:
            world.clock.advance(gap)
            for _ in range(count):
                world.put(tag, rows, width, patience)
            steps = [world.take()] if world.queue.sizes().queued else []
            if steps and steps[0][0] == "wait":
                world.clock.advance(max(0.0, steps[0][1] - world.clock.now()) + 1e-9)
                steps.append(world.take())
            if world.running:
                world.finish(ran, cancelled and bool(world.running[0].batch))
            said.append((steps, world.figures()))
        assert said[0] == said[1]
    assert worlds[0].by_express > (30 if kinds == 1 else 0)
    assert not worlds[1].by_express


def test_one_alone_leaves_by_it() -> None:
    world = World(express=True)
    world.put(1, 2, 1, math.inf)
    work = world.alone()
    assert isinstance(work, BatchAssignment)
    assert [request.tag for request in work.batch] == [1]
    assert work.reason is CloseReason.IDLE
    assert work.predicted == pytest.approx(FIXED + 2 * PER_ROW)
    assert world.queue.sizes().queued == 0
    assert world.queue.sizes().running == 1


def test_a_full_batch_of_one_says_so() -> None:
    world = World(express=True)
    world.put(1, MOST, 1, math.inf)
    work = world.alone()
    assert isinstance(work, BatchAssignment)
    assert work.reason is CloseReason.FULL


@pytest.mark.parametrize(
    "options",
    [
        {"limits": Limits(MOST, 0.1)},
        {"limits": Limits(MOST, 0.0, (2,))},
        {"limits": Limits(MOST, 0.0, merges=False)},
        {"devices": 2},
        {"pipelined": True},
        {"weights": (1, 1)},
        {"policies": (QueuePolicy(),)},
        {"known": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_is_not_usual_goes_the_long_way(options: dict[str, Any]) -> None:
    world = World(express=True, **options)
    world.put(1, 1, 1, math.inf)
    assert world.alone() is None


def test_so_do_two_requests_one_that_takes_too_long_and_one_that_has_little_time() -> None:
    world = World(express=True)
    world.put(1, 1, 1, math.inf)
    assert world.alone(most_seconds=FIXED / 2) is None
    world.put(2, 1, 1, math.inf)
    assert world.alone() is None
    world = World(express=True)
    world.put(1, 1, 1, FIXED + 2 * PER_ROW)
    assert world.alone() is None


def test_one_with_a_deadline_that_has_time_leaves_by_it() -> None:
    world = World(express=True)
    world.put(1, 1, 1, 1.0)
    assert isinstance(world.alone(), BatchAssignment)


def test_and_what_comes_while_a_batch_runs_and_while_the_queue_closes() -> None:
    world = World(express=True)
    world.put(1, 1, 1, math.inf)
    assert isinstance(world.alone(), BatchAssignment)
    world.put(2, 1, 1, math.inf)
    assert world.alone() is None
    world = World(express=True)
    world.put(1, 1, 1, math.inf)
    world.queue.close()
    assert world.alone() is None
