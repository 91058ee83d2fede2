"""A row is charged once, even if its device failed and it runs again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from batcher.conftest import Make
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.batcher.rig import Recorder, reproducible, rows

from tensorferry.batcher import ClientPolicy, InstanceFailed, Request
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.policy.batch_forming import FormedBatch
from tensorferry.batcher.queue.fair_backlog import FairBacklog
from tensorferry.batcher.request import Outcome
from tensorferry.batcher.settings import Limits
from tensorferry.batcher.testing import ScriptedRunner

FAIR = ClientPolicy(fair=True)
MOST = 4


def ignore(outcome: Outcome) -> None:
    """Ignore the outcome."""


def test_a_requeued_request_is_not_charged_again(make: Make) -> None:
    """The requests of a failed batch run again at once, and their client is charged as if the batch
    had not failed.
    """
    failures = [InstanceFailed("the device is broken")]

    def model_fn(x: object) -> object:
        if failures and len(runner.batches) == 2:
            raise failures.pop()
        return x

    runner = ScriptedRunner(model_fn, gated=True)
    batcher = make(runner, MOST, clients=FAIR)
    recorders: list[Recorder] = []

    def send(client: str, tags: Sequence[int]) -> None:
        for tag in tags:
            recorders.append(Recorder())
            request = request_of([float(tag)], recorders[-1], one_row=False)
            request.client = client
            batcher.enqueue(request)

    send("a", [0])
    runner.await_batches(1)
    send("a", range(1, 9))
    runner.release()
    runner.await_batches(2)
    send("b", range(11, 19))
    runner.open()
    for recorder in recorders:
        assert recorder.await_outcome().error is None
    first, failed, again, *others = rows(runner)
    assert (first, failed) == ([0.0], [1.0, 2.0, 3.0, 4.0])
    assert again == failed
    assert sorted(others[0] + others[1]) == [5.0, 6.0, 7.0, 8.0, 11.0, 12.0, 13.0, 14.0]
    assert len(others) == 3


WEIGHTS = {"a": 1, "b": 2, "c": 5}


class FairModel(RuleBasedStateMachine):
    """Reference model beside the backlog: a client's virtual time starts at its arrival, and grows by
    rows that ran.
    """

    @initialize(classes=st.integers(1, 2))
    def start(self, classes: int) -> None:
        self.classes = classes
        self.backlog = FairBacklog(Limits(MOST, 0.0), classes, WEIGHTS, pipelined=False)
        self.number = 0
        self.queued: list[Request] = []
        self.flights: list[list[Request]] = []
        # By class and client: the number of the present backlog period, and the rows that ran in
        # it.
        self.stays: Counter[tuple[int, str]] = Counter()
        self.taken: dict[tuple[int, str, int], float] = {}
        self.dispatched_in: dict[Request, int] = {}

    def rows_of(self, rank: int, client: str) -> int:
        return sum(
            request.rows_counted
            for request in self.queued
            if (request.rank, request.client) == (rank, client)
        )

    def enter(self, request: Request) -> None:
        where = request.rank, request.client
        if not self.rows_of(*where):
            self.stays[where] += 1
            turn = self.backlog._fair_queues[request.rank].shares[request.client].virtual_start
            self.taken[(*where, self.stays[where])] = turn * WEIGHTS[request.client]
        self.queued.append(request)

    @rule(
        client=st.sampled_from("abc"),
        rows_counted=st.integers(1, 3),
        rank=st.integers(0, 1),
        kind=st.integers(0, 1),
        deadline=st.sampled_from([math.inf, 1.0, 2.0]),
    )
    def add(self, client: str, rows_counted: int, rank: int, kind: int, deadline: float) -> None:
        request = Request(
            (), ignore, names=None, rows=rows_counted, nbytes=0, key=kind, deadline=deadline, client=client
        )
        self.number += 1
        request.rank, request.arrival = min(rank, self.classes - 1), float(self.number)
        self.backlog.add(request)
        self.enter(request)

    @precondition(lambda self: self.queued)
    @rule(kind=st.integers(0, 1), rank=st.integers(0, 1), count=st.integers(1, 4))
    def dispatch(self, kind: int, rank: int, count: int) -> None:
        """Start a batch that the first request of a class leads."""
        rank = min(rank, self.classes - 1)
        bucket = self.backlog.bucket(kind)
        batch = list(bucket.class_queues[rank])[:count]
        if not batch:
            return
        taken = [0] * self.classes
        taken[rank] = sum(request.rows_counted for request in batch)
        batch, _, taken = self.backlog.share(
            FormedBatch(batch, [], taken), bucket, 0.0, bucket.cost_model, MOST
        )
        self.backlog.remove_all(kind, batch, taken)
        for request in batch:
            where = request.rank, request.client
            self.taken[(*where, self.stays[where])] += request.rows_counted
            self.dispatched_in[request] = self.stays[where]
            self.queued.remove(request)
        self.flights.append(batch)

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), failed=st.booleans())
    def complete(self, data: st.DataObject, failed: bool) -> None:
        """Complete a batch, or put its requests back."""
        batch = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        if not failed:
            return
        self.backlog.put_back(batch)
        for request in reversed(batch):
            where, stay = (request.rank, request.client), self.dispatched_in.pop(request)
            if self.rows_of(*where) and stay == self.stays[where]:
                self.taken[(*where, stay)] -= request.rows_counted
            self.queued.append(request) if self.rows_of(*where) else self.enter(request)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1)))
        self.backlog.remove(request)

    @invariant()
    def turns_are_what_was_dispatched(self) -> None:
        for rank in range(self.classes):
            shares = self.backlog._fair_queues[rank].shares
            clients = {request.client for request in self.queued if request.rank == rank}
            assert shares.keys() == clients
            for client in clients:
                taken = self.taken[rank, client, self.stays[rank, client]]
                assert shares[client].virtual_start * WEIGHTS[client] == pytest.approx(taken)
                assert shares[client].rows == self.rows_of(rank, client)


TestFairModel = FairModel.TestCase
TestFairModel.settings = settings(reproducible, max_examples=50, stateful_step_count=30)
