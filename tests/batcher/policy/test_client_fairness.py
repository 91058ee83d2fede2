"""Start-time fair queueing by table and by property; bounds of each client."""

from __future__ import annotations

import math

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from batcher.policy.test_close_rule import Affine
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batcher.rig import error, ignore, occupy, reproducible, result, results

from tensorferry.batcher import ClientPolicy, QueueFull, Request, RequestTooLarge, Shed
from tensorferry.batcher.policy.client_fairness import StartTimeFairQueue, all_in_time, pick_by_virtual_time
from tensorferry.batcher.queue.client_quotas import ClientQuotas
from tensorferry.batcher.request import Share
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def wants(client: str, rows: int = 1, deadline: float = math.inf) -> Request:
    return Request((), ignore, names=None, rows=rows, nbytes=0, deadline=deadline, client=client)


def turns_of(clients: dict[str, int], queued: dict[str, int]) -> StartTimeFairQueue:
    turns = StartTimeFairQueue(clients)
    for client, rows in queued.items():
        turns.add_rows(client, rows)
    return turns


def run(turns: StartTimeFairQueue, queues: dict[str, list[Request]], rows: int) -> list[str]:
    """Form a batch of these rows; return the clients of its requests."""
    chosen = pick_by_virtual_time({name: iter(queue) for name, queue in queues.items()}, turns.shares, rows)
    for request in chosen:
        turns.charge(request)
    for request in chosen:
        queues[request.client].remove(request)
        turns.remove_rows(request.client, request.rows_counted)
    for name in [name for name, queue in queues.items() if not queue]:
        del queues[name]
    return [request.client for request in chosen]


@pytest.mark.parametrize(
    ("weights", "queued", "rows", "chosen"),
    [
        pytest.param({}, {"a": 9, "b": 9}, 4, "abab", id="alternating"),
        pytest.param({}, {"a": 9, "b": 1}, 4, "abaa", id="unused share goes to others"),
        pytest.param({"a": 3}, {"a": 9, "b": 9}, 8, "abaaabaa", id="by weight"),
        pytest.param({}, {"a": 2, "b": 2}, 9, "abab", id="all fit"),
    ],
)
def test_the_smallest_virtual_start_is_next(
    weights: dict[str, int], queued: dict[str, int], rows: int, chosen: str
) -> None:
    queues = {name: [wants(name) for _ in range(count)] for name, count in queued.items()}
    got = run(turns_of(weights, queued), queues, rows)
    assert sorted(got) == sorted(chosen)


def test_a_new_client_has_no_saved_share() -> None:
    turns = turns_of({}, {"a": 1000})
    queues = {"a": [wants("a") for _ in range(1000)]}
    for _ in range(10):
        run(turns, queues, 32)
    turns.add_rows("b", 100)
    queues["b"] = [wants("b") for _ in range(100)]
    assert run(turns, queues, 32).count("a") == 16


@settings(reproducible, max_examples=30)
@given(
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    costs=st.lists(st.integers(1, 8), min_size=40, max_size=40),
    batches=st.lists(st.integers(8, 32), min_size=1, max_size=6),
)
def test_backlogged_clients_get_rows_by_weight(
    weights: list[int], costs: list[int], batches: list[int]
) -> None:
    """The paper's bound: two backlogged clients differ by at most their largest requests, by weight."""
    by_name = dict(zip("abcd", weights, strict=False))
    queues = {name: [wants(name, rows_counted) for rows_counted in costs] for name in by_name}
    turns = turns_of(by_name, dict.fromkeys(by_name, sum(costs)))
    served = dict.fromkeys(by_name, 0.0)
    for rows in batches:
        left = {name: len(queue) for name, queue in queues.items()}
        run(turns, queues, rows)
        if len(queues) < len(by_name):
            return
        for name, weight in by_name.items():
            gone = len(costs) - left[name], len(costs) - len(queues[name])
            served[name] += sum(costs[slice(*gone)]) / weight
        most, least = max(served, key=served.__getitem__), min(served, key=served.__getitem__)
        # A request that does not fit waits for the next batch, which may happen each time.
        bound = (8 / by_name[most] + 8 / by_name[least]) * (1 + len(batches))
        assert served[most] - served[least] <= bound


@pytest.mark.parametrize(
    ("deadlines", "part", "expected"),
    [
        ([30.0, 30.0, 54.0, 54.0], 1.0, True),
        ([30.0, 30.0, 18.0, 18.0], 1.0, False),
        ([30.0, 30.0, 54.0, 54.0], 0.4, False),
        ([], 1.0, True),
    ],
)
def test_whether_all_can_be_in_time(deadlines: list[float], part: float, expected: bool) -> None:
    """Each batch of two rows takes 12 s."""
    with_deadline = [wants("a", deadline=deadline) for deadline in deadlines]
    assert all_in_time(with_deadline, len(with_deadline), 2, 0.0, Affine(), part) is expected


def test_the_client_over_its_share_makes_room() -> None:
    turns = turns_of({"b": 4}, {"a": 6, "b": 8})
    assert turns.over_share_client("new", 1, 14) == "a", "of 14 rows a may have 14/6, b 56/6"
    assert turns.over_share_client("new", 2, 14) == "a", "two rows are exactly its share"
    assert turns.over_share_client("a", 1, 14) is None, "it has more than its share itself"
    assert turns.over_share_client("new", 9, 14) is None, "it would have more than its share"
    assert isinstance(turns.shares["b"], Share)


def test_a_full_queue_accepts_clients_below_their_share(make: Make) -> None:
    runner = ScriptedRunner(gated=True)
    batcher = make(runner, 2, max_queue_size=4, clients=ClientPolicy(fair=True))
    first = occupy(batcher, runner)
    greedy = [batcher.submit(float(number), client="greedy") for number in range(4)]
    with pytest.raises(QueueFull):
        batcher.submit(9.0, client="greedy")
    meek = [batcher.submit(9.0, client="meek") for _ in range(2)]
    with pytest.raises(QueueFull):
        batcher.submit(9.0, client="meek")
    assert isinstance(error(greedy[3]), Shed)
    assert "clients that hold less than their share" in str(error(greedy[2]))
    runner.open()
    results([first, *greedy[:2], *meek])


def test_a_queue_that_a_higher_class_fills_refuses_every_client(busy: Busy) -> None:
    batcher, _ = busy(None, 2, max_queue_size=1, priority_weights=(1, 1), clients=ClientPolicy(fair=True))
    batcher.submit(1.0, client="a", priority=1)
    with pytest.raises(QueueFull):
        batcher.submit(1.0, client="b", priority=2)


def test_the_kinds_of_a_single_client_run_in_order_of_their_deadlines(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, 4, clients=ClientPolicy(fair=True), clock=clock)
    for rows in (1, 4):
        batcher.add_warmup_sample(rows, 1.0)
    occupy(batcher, runner)
    kinds = [("f4", 7.0), ("i8", 5.0), ("f2", 6.0)]
    futures = [batcher.submit(np.ones((), kind), timeout=timeout) for kind, timeout in kinds]
    runner.open()
    assert results(futures) == [2] * 3
    assert [batch.dtype for batch in runner.batches[1:]] == ["i8", "f2", "f4"]


@pytest.mark.parametrize(
    ("policy", "sent", "words"),
    [
        (ClientPolicy(max_requests=2), [1, 1, 1], "2 requests of client 'a' are not answered yet"),
        (ClientPolicy(max_requests=2), [9, 1, 1], "2 requests of client 'a' are not answered yet"),
        (ClientPolicy(max_rows=3), [2, 2], "2 rows of client 'a' are not answered yet, the request has 2"),
        (ClientPolicy(max_bytes=20), [1, 1, 1], "16 bytes of client 'a' are not answered yet"),
        (ClientPolicy(rate=2.0), [1, 1, 1], "client 'a' sends more than 2 rows a second; retry in 0.5"),
    ],
    ids=["requests", "split requests", "rows", "bytes", "rate"],
)
def test_a_client_is_held_to_its_bounds(
    make: Make, policy: ClientPolicy, sent: list[int], words: str
) -> None:
    """Other clients are served meanwhile, and it is served again once its requests are answered."""
    clock = VirtualClock()
    runner = ScriptedRunner(gated=True)
    batcher = make(runner, 4, clock=clock, clients=policy)
    first = occupy(batcher, runner)
    accepted = [batcher.submit_rows([1.0] * rows, client="a") for rows in sent[:-1]]
    with pytest.raises(QueueFull, match=words) as refused:
        batcher.submit_rows([1.0] * sent[-1], client="a")
    assert refused.value.retry_after > 0
    accepted.append(batcher.submit(1.0, client="b"))
    accepted[-1].cancel()
    runner.open()
    results([first, *accepted[:-1]])
    clock.advance(refused.value.retry_after)
    result(batcher.submit_rows([1.0] * sent[-1], client="a"))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (ClientPolicy(max_rows=3), "has 4 rows; a client may have 3"),
        (ClientPolicy(max_bytes=8), "has 32 bytes; a client may have 8"),
        (ClientPolicy(rate=10, burst=3), "has 4 rows; a client may send 3 at once and 10 a second"),
    ],
)
def test_a_request_beyond_a_clients_bounds_is_refused(make: Make, policy: ClientPolicy, words: str) -> None:
    batcher = make(ScriptedRunner(), 2, clients=policy)
    with pytest.raises(RequestTooLarge, match=words):
        batcher.submit_rows([1.0] * 4, client="a")


def test_a_client_may_retry_once_there_is_room_for_its_request() -> None:
    quotas = ClientQuotas(ClientPolicy(max_requests=4))
    request = wants("a")
    for _ in range(4):
        quotas.accepted([request], 0.0)
    with pytest.raises(QueueFull) as refused:
        quotas.check("a", 1, 0, 0.0, lambda: 8.0)
    assert refused.value.retry_after == 2.0, "a quarter of the time until the queue is empty"


def test_many_client_names_use_bounded_memory() -> None:
    quotas = ClientQuotas(ClientPolicy(rate=1.0, burst=5, max_requests=9))
    for number in range(20_000):
        request = wants(f"address {number}")
        quotas.check(request.client, 1, 0, 0.0, float)
        quotas.accepted([request], 0.0)
        quotas.done(request)
    assert quotas.clients <= 4097
    late = wants("late")
    for _ in range(5000):
        quotas.accepted([late], 100.0)
        quotas.done(late)
    assert quotas.clients == 1, "a client without recent requests is forgotten"
