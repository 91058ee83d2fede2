"""The product's queue in virtual time, with clients that together exceed capacity: fair shares."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from support.batcher.rig import ignore

from tensorferry.batcher import BatcherError, ClientPolicy, Request
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import VirtualClock

MOST, FIXED, PER_ROW = 32, 0.004, 0.0002
CAPACITY = MOST / (FIXED + PER_ROW * MOST)
SECONDS = 1.0
# Rows that may wait, more than deadlines allow.
LONG = 4096
FAIR = ClientPolicy(fair=True)


@dataclass(frozen=True)
class Sender:
    """A client's traffic, relative to capacity, its timeout (0: none), and its number of kinds."""

    load: float
    timeout: float = 0.04
    kinds: int = 1
    rows: int = 1


def answered(
    senders: Mapping[str, Sender],
    clients: ClientPolicy | None,
    *,
    devices: int = 1,
    pipelined: bool = False,
    max_rows: int = LONG,
    seed: int = 7,
) -> Mapping[str, float]:
    """Return the rows in time of each client, relative to the rate of full batches."""
    chance = random.Random(seed)
    clock = VirtualClock()
    queue = RequestQueue(
        BatcherSettings(
            MOST,
            0.0,
            max_queue_size=max_rows,
            max_queue_bytes=1 << 30,
            devices=devices,
            pipelined=pipelined,
            clients=clients,
        ),
        clock,
    )
    for rows in (1, MOST):
        queue.add_warmup_sample(rows, FIXED + PER_ROW * rows)
    number = 0
    events: list[tuple[float, int, BatchAssignment | Request | None, int]] = []
    for client, sender in senders.items():
        now = 0.0
        while now < SECONDS:
            now += chance.expovariate(sender.load / sender.rows * CAPACITY * devices)
            request = Request(
                (),
                ignore,
                names=None,
                rows=sender.rows,
                nbytes=0,
                key=(client, chance.randrange(sender.kinds)) if sender.kinds > 1 else None,
                deadline=now + sender.timeout if sender.timeout else float("inf"),
                client=client,
            )
            heapq.heappush(events, (now, number := number + 1, request, -1))
    free, flying, timers = [0.0] * devices, [0] * devices, set[float]()
    got: Counter[str] = Counter()
    while events and events[0][0] < SECONDS:
        when, _, event, device = heapq.heappop(events)
        clock.advance(when - clock.now())
        if isinstance(event, Request):
            try:
                queue.put([event])
            except BatcherError:
                continue
        elif event is not None:
            flying[device] -= 1
            if pipelined:
                queue.run_done(device)
            for request in queue.finish(event.batch):
                got[request.client] += request.rows if request.deadline > when else 0
            rows = sum(request.rows for request in event.batch)
            queue.batch_done(event.batch, FIXED + PER_ROW * rows, device=device)
        for device in range(devices):
            if flying[device] > pipelined:
                continue
            step = queue.poll(device)
            if isinstance(step, BatchAssignment) and step.batch:
                start = max(clock.now(), free[device])
                flying[device] += 1
                free[device] = start + FIXED + PER_ROW * sum(request.rows for request in step.batch)
                heapq.heappush(events, (free[device], number := number + 1, step, device))
            elif isinstance(step, BatchAssignment):
                queue.batch_done((), None, device=device)
            elif isinstance(step, Wait) and clock.now() < step.until < SECONDS and step.until not in timers:
                timers.add(step.until)
                heapq.heappush(events, (step.until, number := number + 1, None, devices))
    return {client: got[client] / SECONDS / CAPACITY / devices for client in senders}


SHARED: Mapping[str, Mapping[str, Sender]] = {
    "deadlines": {"greedy": Sender(10), "meek": Sender(0.3)},
    "half of it": {"greedy": Sender(10), "meek": Sender(0.45)},
    "no deadlines": {"greedy": Sender(10, 0), "meek": Sender(0.3, 0)},
    "greedy has no deadlines": {"greedy": Sender(10, 0), "meek": Sender(0.3)},
    "greedy has longer deadlines": {"greedy": Sender(10, 0.2), "meek": Sender(0.3)},
    "greedy has shorter deadlines": {"greedy": Sender(10), "meek": Sender(0.3, 0.5)},
    "requests of several rows": {"greedy": Sender(10, rows=4), "meek": Sender(0.3, rows=8)},
    "three": {"greedy": Sender(10), "meek": Sender(0.25), "other": Sender(0.25)},
}


# With deadlines, a long queue refuses greedy clients behind their own queued requests, which leaves
# room for others. A short queue they keep full, and other clients are refused.
SHORT = {"greedy has longer deadlines": 128, "greedy has shorter deadlines": 128}


@pytest.mark.parametrize("case", SHARED)
def test_a_greedy_client_takes_nothing_of_anothers_share(case: str) -> None:
    """A client below its share gets all it asks for, and the total is no less than without fair
    shares.
    """
    senders, max_rows = SHARED[case], SHORT.get(case, LONG)
    without, fair = (answered(senders, clients, max_rows=max_rows) for clients in (None, FAIR))
    meek = [name for name in senders if name != "greedy"]
    assert all(without[name] < 0.4 * senders[name].load for name in meek), "what this is against"
    assert all(fair[name] > 0.9 * senders[name].load for name in meek)
    assert sum(fair.values()) >= 0.97 * sum(without.values())


@pytest.mark.parametrize("case", SHORT)
def test_fair_shares_complete_what_deadlines_give(case: str) -> None:
    """In a long queue a client gets most of its share by its deadlines alone, and with fair shares the
    rest.
    """
    senders = SHARED[case]
    without, fair = answered(senders, None), answered(senders, FAIR)
    assert without["meek"] < 0.9 * senders["meek"].load, "what this is against"
    assert fair["meek"] > 0.9 * senders["meek"].load
    assert sum(fair.values()) >= 0.97 * sum(without.values())


def test_kinds_that_share_no_batch() -> None:
    """A greedy client delays another's bucket no more than its requests."""
    senders = {"greedy": Sender(10, 0.1, kinds=4), "meek": Sender(0.3, 0.1)}
    without, fair = answered(senders, None), answered(senders, FAIR)
    assert without["meek"] < 0.1
    assert fair["meek"] > 0.9 * 0.3
    assert sum(fair.values()) >= 0.97 * sum(without.values())


def test_all_want_more_than_there_is() -> None:
    weights = {"a": 3, "b": 1}
    got = answered({"a": Sender(5), "b": Sender(5)}, ClientPolicy(fair=True, weights=weights))
    assert got["a"] == pytest.approx(0.75, abs=0.03)
    assert got["b"] == pytest.approx(0.25, abs=0.03)


def test_alone_a_client_gets_everything() -> None:
    senders = {"greedy": Sender(10)}
    assert answered(senders, FAIR) == answered(senders, None)


def test_where_all_can_be_in_time_deadlines_alone_count() -> None:
    senders = {"a": Sender(0.5, 0.03), "b": Sender(0.4, 0.2)}
    assert answered(senders, FAIR) == answered(senders, None)


@pytest.mark.parametrize(("devices", "pipelined"), [(2, False), (1, True)], ids=["two", "pipelined"])
def test_other_devices(devices: int, pipelined: bool) -> None:
    senders = {"greedy": Sender(10, 0.06), "meek": Sender(0.3, 0.06)}
    fair = answered(senders, FAIR, devices=devices, pipelined=pipelined)
    assert fair["meek"] > 0.9 * 0.3
    assert sum(fair.values()) >= 0.97 * sum(
        answered(senders, None, devices=devices, pipelined=pipelined).values()
    )


def test_a_full_queue_has_room_for_a_client_below_its_share() -> None:
    """Without deadlines greedy clients fill the queue; a client below its share displaces them."""
    senders = {"greedy": Sender(10, 0), "meek": Sender(0.3, 0)}
    assert answered(senders, FAIR, max_rows=64)["meek"] > 0.9 * 0.3
