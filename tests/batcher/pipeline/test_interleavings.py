"""In any order in which threads continue at locks, each accepted request of a pipeline ends exactly once, as it should.

Each seed is another pipeline and another interleaving of callers, workers and a closer, in virtual time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.batcher.interleave import ControlledThread, Interleaver
from support.batcher.rig import figures_add_up

from tensorferry.batcher import (
    Batcher,
    BatcherClosed,
    BatcherError,
    Cancelled,
    DeadlineExceeded,
    Outcome,
    Pipeline,
    Request,
    Shed,
    Stage,
    StageModel,
)
from tensorferry.batcher.execution.collate import request_of

# The stages of each shape: what each reads and gives.
SHAPES: Mapping[str, Mapping[str, tuple[tuple[str, ...], str]]] = {
    "line": {"a": (("x",), "m"), "b": (("m",), "y")},
    "long": {"a": (("x",), "m"), "b": (("m",), "n"), "c": (("n",), "y")},
    "fork": {"a": (("x",), "m"), "b": (("x",), "n"), "join": (("m", "n"), "y")},
    "diamond": {
        "a": (("x",), "k"),
        "b": (("k",), "m"),
        "c": (("k",), "n"),
        "join": (("m", "n", "k"), "y"),
    },
}
# A request whose second column has the number of a stage fails in that stage.
STEPS: Mapping[str, tuple[float, Callable[..., Any]]] = {
    "a": (1.0, lambda x: x + 1),
    "b": (2.0, lambda x: x * 2),
    "c": (3.0, lambda x: x - 3),
    "join": (4.0, lambda *values: sum(values)),
}
HEALTHY = 0.0
MOST_ROWS = 12


@dataclass
class Sent:
    value: float
    fails_in: float
    rows: int
    deadline: float
    request: Request | None = None
    outcomes: list[tuple[float, Outcome]] = field(default_factory=list)


class Scenario:
    """A pipeline, its callers, and the thread that closes it, made from a seed."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.interleaver = Interleaver(seed)
        self.interleaver.install(monkeypatch)
        self.shape = SHAPES[self.random.choice(list(SHAPES))]
        # Stages whose batchers belong to others.
        self.others = {name for name in self.shape if self.random.random() < 0.25}
        self.attending = self.random.random() < 0.3
        self.slow = self.random.random() < 0.3
        self.sent: list[Sent] = []
        self.running = dict.fromkeys(self.shape, 0)
        self.pipeline: Pipeline

    def model_fn(self, name: str) -> Callable[[Any], Any]:
        number, step = STEPS[name]
        seconds = self.random.choice([0.001, 0.01])

        def run(inputs: Mapping[str, Any]) -> Any:
            self.running[name] += 1
            assert self.running[name] == 1, "one thread at a time"
            values = list(inputs.values())
            self.interleaver.sleep(seconds * (1 + 0.1 * len(values[0])))
            self.running[name] -= 1
            if (values[0][:, 1] == number).any():
                raise ValueError(name)
            value = step(*[array[:, 0] for array in values])
            return {"out": np.stack([value, values[0][:, 1]], axis=1)}

        return run

    def main(self) -> None:
        clock, batchers, stages = self.interleaver.clock, {}, []
        for name, (reads, gives) in self.shape.items():
            batcher = batchers[name] = Batcher(
                self.model_fn(name),
                self.random.choice([2, 4]),
                max_queue_size=MOST_ROWS,
                clock=clock,
                name=name,
                pipelined=self.random.random() < 0.2,
            )
            model: Any = partial(StageModel, batcher) if name in self.others else batcher
            stages.append(
                Stage(name, model, {f"in{at}": tensor for at, tensor in enumerate(reads)}, {"out": gives})
            )
        self.pipeline = Pipeline("p", stages, inputs=["x"], outputs=["y"], clock=clock)
        callers = [self.start_thread(f"caller-{number}", partial(self.call, number)) for number in range(3)]
        closing = self.random.choice(["after", "drain", "abandon"])
        if closing != "after":
            self.interleaver.sleep(self.random.choice([0.0, 0.01, 0.03]))
            self.pipeline.close(drain=closing == "drain", timeout=self.random.choice([None, None, 0.005]))
        for caller in callers:
            caller.join()
        if self.random.random() < 0.5:
            assert self.pipeline.drain()
            assert all(len(sent.outcomes) == 1 for sent in self.sent), "drained, completions included"
        assert self.pipeline.close()
        assert all(len(sent.outcomes) == 1 for sent in self.sent)
        for name in self.others:
            assert batchers[name].close()

    def start_thread(self, name: str, target: Callable[[], object]) -> ControlledThread:
        thread = ControlledThread(self.interleaver, target, name)
        thread.start()
        return thread

    def call(self, number: int) -> None:
        mine: list[Sent] = []
        for turn in range(6):
            if self.random.random() < 0.5:
                self.interleaver.sleep(self.random.choice([0.0, 0.001, 0.012]))
            if mine and self.random.random() < 0.2:
                request = self.random.choice(mine).request
                assert request is not None
                self.pipeline.cancel(request)
                continue
            timeout = self.random.choice([math.inf, math.inf, 0.004, 0.03, 0.1])
            sent = Sent(
                100.0 + 10 * number + turn,
                STEPS[self.random.choice(list(self.shape))][0] if self.random.random() < 0.15 else HEALTHY,
                self.random.choice([1, 1, 1, 2, 3, 6]),
                self.interleaver.now() + timeout,
            )
            request = request_of(
                {"x": np.array([[sent.value, sent.fails_in]] * sent.rows)},
                partial(self.complete, sent),
                one_row=False,
                deadline=sent.deadline,
            )
            try:
                must_run = self.pipeline.enqueue(request, notify=not self.attending)
            except BatcherError:
                assert not sent.outcomes
                assert request.pipeline_run is None
                continue
            sent.request = request
            mine.append(sent)
            self.sent.append(sent)
            if must_run:
                assert self.attending
                while (again := self.pipeline.run_inline(1.0)) < math.inf:
                    self.interleaver.sleep(again - self.interleaver.now())

    def complete(self, sent: Sent, outcome: Outcome) -> None:
        sent.outcomes.append((self.interleaver.now(), outcome))
        if self.slow and self.random.random() < 0.3:
            self.interleaver.sleep(self.random.choice([0.0, 0.002, 0.02]))

    def expected(self, value: float) -> float:
        tensors = {"x": value}
        for name, (reads, gives) in self.shape.items():
            tensors[gives] = STEPS[name][1](*[tensors[tensor] for tensor in reads])
        return tensors["y"]

    def check(self) -> None:
        for sent in self.sent:
            ((when, outcome),) = sent.outcomes
            error = outcome.error
            if error is None:
                assert outcome.outputs["y"].tolist() == [[self.expected(sent.value), HEALTHY]] * sent.rows
                assert [each.batch is not None for each in outcome.stages] == [True] * len(self.shape)
                assert self.slow or when < sent.deadline
            elif isinstance(error, ValueError):
                assert sent.fails_in == STEPS[str(error)][0], "failed by a neighbour's fault"
            elif isinstance(error, DeadlineExceeded):
                assert sent.deadline < math.inf
            elif type(error).__name__ == "QueueFull":
                assert self.others, "no stage of its own refuses what was accepted"
            else:
                assert isinstance(error, (Cancelled, Shed, BatcherClosed)), error
            assert sent.request is not None
            assert (sent.request.pipeline_run, sent.request.tensors) == (None, ())
        counts = self.pipeline.statistics()
        assert counts.accepted == len(self.sent)
        ended = (
            counts.answered,
            counts.failed,
            counts.cancelled,
            counts.expired,
            counts.shed,
            counts.abandoned,
        )
        assert sum(ended) == len(self.sent)
        for stage in self.pipeline.stage_statistics().values():
            figures_add_up(stage)


@pytest.mark.parametrize("block", range(10))
def test_in_whatever_order_threads_go_on_each_request_ends_once(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(40 * block, 40 * (block + 1)):
        with monkeypatch.context() as patch:
            scenario = Scenario(seed, patch)
            try:
                scenario.interleaver.run(scenario.main)
                scenario.check()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
