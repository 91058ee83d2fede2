"""What rides counts once: not again when its device failed, and on a slower device as on any other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from batcher.conftest import Make
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.batcher.rig import Recorder, reproducible, rows

from tensorferry.batcher import ClientPolicy, InstanceFailed, Request
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.policy.batch_forming import Formed
from tensorferry.batcher.queue.fair_backlog import FairBacklog
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Outcome
from tensorferry.batcher.settings import Limits
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

FAIR = ClientPolicy(fair=True)
MOST = 4


def ignore(outcome: Outcome) -> None:
    """Nobody waits."""


def test_who_went_back_is_not_charged_again(make: Make) -> None:
    """Those of a failed batch are run again at once, and then their client is as far as it would have been."""
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


FAST, SLOW = 0, 1
SECONDS = {FAST: 0.1, SLOW: 0.3}


class TwoDevices:
    """A queue of two clients whose devices are of different speed, each run in its own time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.queue = RequestQueue(
            Limits(MOST, 0.0), 100_000, 1 << 30, self.clock, devices=len(SECONDS), clients=FAIR
        )
        for count in (1, MOST):
            self.queue.anchor(count, SECONDS[FAST])
        # So that the paces are known.
        for _ in range(5):
            for device in SECONDS:
                self.put("a", 1)
                self.end(device, self.start(device))

    def put(self, client: str, count: int) -> None:
        for _ in range(count):
            self.queue.put([Request((), ignore, names=None, rows=1, nbytes=0, client=client)])

    def start(self, device: int) -> Sequence[Request]:
        step = self.queue.poll(device)
        assert isinstance(step, BatchAssignment)
        assert step.batch
        return step.batch

    def end(self, device: int, batch: Sequence[Request]) -> Mapping[str, int]:
        self.clock.advance(SECONDS[device])
        self.queue.finish(batch)
        self.queue.ran(batch, SECONDS[device], device=device)
        return Counter(request.client for request in batch)


def test_what_a_slower_device_takes_counts_too() -> None:
    """It takes them in their order, all of one client's; the fast one makes up for it."""
    devices = TwoDevices()
    devices.put("a", 1000)
    devices.put("b", 1000)
    got: Counter[str] = Counter()
    on_slow: Counter[str] = Counter()
    for _ in range(20):
        for _ in range(3):
            got.update(devices.end(FAST, devices.start(FAST)))
        on_slow.update(devices.end(SLOW, devices.start(SLOW)))
    assert on_slow == {"a": 20 * MOST}, "what this is about"
    got += on_slow
    assert got["a"] == pytest.approx(got["b"], abs=2 * MOST)


WEIGHTS = {"a": 1, "b": 2, "c": 5}


class FairModel(RuleBasedStateMachine):
    """A backlog beside the plain rule: a turn is where its client came, and on by what rode and was not put back."""

    @initialize(classes=st.integers(1, 2))
    def start(self, classes: int) -> None:
        self.classes = classes
        self.backlog = FairBacklog(Limits(MOST, 0.0), classes, WEIGHTS, pipelined=False)
        self.number = 0
        self.queued: list[Request] = []
        self.flights: list[list[Request]] = []
        # Of each class, by client: which stay of its in the queue this is, and the rows that rode in it.
        self.stays: Counter[tuple[int, str]] = Counter()
        self.rode: dict[tuple[int, str, int], float] = {}
        self.rode_in: dict[Request, int] = {}

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
            turn = self.backlog._turns[request.rank].shares[request.client].turn
            self.rode[(*where, self.stays[where])] = turn * WEIGHTS[request.client]
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
        request.edf_key = deadline, self.number
        self.backlog.add(request, self.backlog.bucket(kind))
        self.enter(request)

    @precondition(lambda self: self.queued)
    @rule(kind=st.integers(0, 1), rank=st.integers(0, 1), count=st.integers(1, 4), slower=st.booleans())
    def leave(self, kind: int, rank: int, count: int, slower: bool) -> None:
        """A batch of the first of a class leaves, be it for a slower device."""
        rank = min(rank, self.classes - 1)
        bucket = self.backlog.bucket(kind)
        batch = list(bucket.class_queues[rank])[:count]
        if not batch:
            return
        taken = [0] * self.classes
        taken[rank] = sum(request.rows_counted for request in batch)
        if slower:
            self.backlog.charge(batch)
        else:
            batch, _, taken = self.backlog.share(Formed(batch, [], taken), bucket, 0.0, bucket.profile, MOST)
        self.backlog.remove_all(kind, batch, taken)
        for request in batch:
            where = request.rank, request.client
            self.rode[(*where, self.stays[where])] += request.rows_counted
            self.rode_in[request] = self.stays[where]
            self.queued.remove(request)
        self.flights.append(batch)

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), failed=st.booleans())
    def land(self, data: st.DataObject, failed: bool) -> None:
        """A batch has run, or goes back."""
        batch = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        if not failed:
            return
        self.backlog.put_back(batch)
        for request in reversed(batch):
            where, stay = (request.rank, request.client), self.rode_in.pop(request)
            if self.rows_of(*where) and stay == self.stays[where]:
                self.rode[(*where, stay)] -= request.rows_counted
            self.queued.append(request) if self.rows_of(*where) else self.enter(request)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1)))
        self.backlog.remove(request)

    @invariant()
    def turns_are_what_rode(self) -> None:
        for rank in range(self.classes):
            shares = self.backlog._turns[rank].shares
            clients = {request.client for request in self.queued if request.rank == rank}
            assert shares.keys() == clients
            for client in clients:
                rode = self.rode[rank, client, self.stays[rank, client]]
                assert shares[client].turn * WEIGHTS[client] == pytest.approx(rode)
                assert shares[client].rows == self.rows_of(rank, client)


TestFairModel = FairModel.TestCase
TestFairModel.settings = settings(reproducible, max_examples=200, stateful_step_count=30)
