"""Callers of a batcher or a pipeline in an order of threads that a seed decides: each request ends once, as it should."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from support.batcher.interleave import ControlledThread, Interleaver

from tensorferry.batcher import (
    BatcherClosed,
    BatcherError,
    BatcherStatistics,
    Cancelled,
    DeadlineExceeded,
    Outcome,
    Request,
    Shed,
)

MOST_ROWS = 12


@dataclass
class Sent:
    """A request that was accepted, and what a caller expects of it."""

    request: Request
    deadline: float
    tag: float
    fault: Any = None
    outcomes: list[tuple[float, Outcome]] = field(default_factory=list)


class Scenario:
    """Callers and the thread that closes the served batcher or pipeline, made from a seed."""

    turns = 7

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.interleaver = Interleaver(seed, self.before_time_moves)
        self.interleaver.install(monkeypatch)
        # Completions take time.
        self.slow = self.random.random() < 0.5
        self.sent: list[Sent] = []
        self.closing = ""
        # The batcher or the pipeline, once it is made.
        self.served: Any = None

    def before_time_moves(self) -> None:
        """Check, before time moves, that every thread waits where it should."""

    def make(self) -> Any:
        """Make the batcher or the pipeline."""
        raise NotImplementedError

    def new_sent(self, number: int, deadline: float) -> Sent:
        """Make a request of a caller; `complete` is set later."""
        raise NotImplementedError

    def enqueue(self, number: int, request: Request) -> None:
        raise NotImplementedError

    def check_answer(self, sent: Sent, outputs: Any) -> None:
        raise NotImplementedError

    def main(self) -> None:
        self.served = self.make()
        callers = [self.start_thread(f"caller-{at}", partial(self.call, at)) for at in range(3)]
        self.closing = self.random.choice(["after", "drain", "abandon"])
        if self.closing != "after":
            self.interleaver.sleep(self.random.choice([0.0, 0.02, 0.05]))
            self.served.close(drain=self.closing == "drain", timeout=self.random.choice([None, None, 0.005]))
        for caller in callers:
            caller.join()
        if self.random.random() < 0.5:
            assert self.served.drain()
            assert all(len(sent.outcomes) == 1 for sent in self.sent), "drained, completions included"
        assert self.served.close()

    def start_thread(self, name: str, target: Callable[[], object]) -> ControlledThread:
        thread = ControlledThread(self.interleaver, target, name)
        thread.start()
        return thread

    def call(self, number: int) -> None:
        mine: list[Sent] = []
        for _ in range(self.turns):
            if self.random.random() < 0.5:
                self.interleaver.sleep(self.random.choice([0.0, 0.001, 0.012, 0.03]))
            if mine and self.random.random() < 0.2:
                self.served.cancel(self.random.choice(mine).request)
                continue
            timeout = self.random.choice([math.inf, math.inf, 0.004, 0.02, 0.05])
            sent = self.new_sent(number, self.interleaver.now() + timeout)
            sent.request.complete = partial(self.complete, sent)
            try:
                self.enqueue(number, sent.request)
            except BatcherError:
                assert not sent.outcomes
                continue
            mine.append(sent)
            self.sent.append(sent)

    def run_inline(self, most: float) -> None:
        while (again := self.served.run_inline(most)) < math.inf:
            self.interleaver.sleep(again - self.interleaver.now())

    def complete(self, sent: Sent, outcome: Outcome) -> None:
        sent.outcomes.append((self.interleaver.now(), outcome))
        if self.slow and self.random.random() < 0.3:
            self.interleaver.sleep(self.random.choice([0.0, 0.002, 0.02]))

    def check(self) -> None:
        for sent in self.sent:
            ((when, outcome),) = sent.outcomes
            if outcome.error is None:
                self.check_answer(sent, outcome.outputs)
                assert self.slow or when < sent.deadline
            elif isinstance(outcome.error, ValueError):
                assert sent.fault == str(outcome.error), "failed by a neighbour's fault"
            elif isinstance(outcome.error, DeadlineExceeded):
                assert sent.deadline < math.inf
            else:
                self.check_error(outcome.error)
        counts: BatcherStatistics = self.served.statistics()
        names = ("answered", "failed", "cancelled", "expired", "shed", "abandoned")
        assert counts.accepted == len(self.sent) == sum(getattr(counts, name) for name in names)

    def check_error(self, error: BaseException) -> None:
        """Check another error of a request."""
        assert isinstance(error, (Cancelled, Shed, BatcherClosed)), error


def play(
    seeds: range,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[int, pytest.MonkeyPatch], Scenario],
    prepare: Callable[[Any], None] = lambda scenario: None,
) -> None:
    """Run the scenario of each seed to its end; the error of a failing seed names it."""
    for seed in seeds:
        with monkeypatch.context() as patch:
            scenario = make(seed, patch)
            prepare(scenario)
            try:
                scenario.interleaver.run(scenario.main)
                scenario.check()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
