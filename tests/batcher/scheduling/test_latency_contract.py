"""The latency contract: how many batches may start before an accepted request does.

With one row per request and one bucket: the running batches and ⌈rows ahead / max_batch_size⌉ more.
Requests of up to r rows can leave r - 1 places of a batch empty, so the divisor is then
max_batch_size - r + 1. Requests that cannot share a batch are counted by bucket.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from batcher.conftest import Make
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import Recorder, occupy, reproducible, result

from tensorferry.batcher import Request
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

MAX = 6


@dataclass
class Promise:
    """The bound promised to an accepted request."""

    request: Request
    started_before: int
    bound: int = field(default=0)


def promised(ahead: list[Request], request: Request) -> int:
    by_kind: defaultdict[object, list[Request]] = defaultdict(list)
    for other in ahead:
        by_kind[other.key].append(other)
    total = 0
    for key, others in by_kind.items():
        largest = max(other.rows_counted for other in others + ([request] if key == request.key else []))
        total += math.ceil(sum(other.rows_counted for other in others) / (MAX - largest + 1))
    return total


# A positive number is a request with that many rows, of one of two kinds; zero closes a batch.
steps = st.lists(st.tuples(st.integers(0, MAX), st.booleans()), max_size=60)


@reproducible
@given(steps=steps, most_rows=st.sampled_from([1, 2, MAX]), kinds=st.sampled_from([1, 2]))
def test_no_request_waits_for_more_batches_than_promised(
    steps: list[tuple[int, bool]], most_rows: int, kinds: int
) -> None:
    clock = VirtualClock()
    queue = RequestQueue(BatcherSettings(MAX, 0.0, max_queue_size=10_000, max_queue_bytes=1 << 30), clock)
    waiting: list[Promise] = []
    batches = 0
    for size, kind in [*steps, *[(0, False)] * len(steps)]:
        if size:
            width = 1 + (kind and kinds == 2)
            request = request_of(np.zeros((min(size, most_rows), width)), Recorder(), one_row=False)
            bound = promised([promise.request for promise in waiting], request)
            queue.put([request])
            clock.advance(1)
            waiting.append(Promise(request, batches, bound))
        elif waiting:
            work = queue.take()
            assert isinstance(work, BatchAssignment)
            for promise in [promise for promise in waiting if promise.request in work.batch]:
                assert batches - promise.started_before <= promise.bound
                waiting.remove(promise)
            batches += 1
    assert not waiting


def test_a_busy_kind_does_not_starve_another(make: Make, runner: ScriptedRunner, clock: VirtualClock) -> None:
    """However many requests arrive after it, a lone request of another kind runs in its turn."""
    batcher = make(runner, 2, clock=clock)
    occupy(batcher, runner)
    batcher.submit_rows(np.zeros(2))
    clock.advance(1)
    lonely = batcher.submit(np.float32(1))
    for _ in range(10):
        clock.advance(1)
        batcher.submit_rows(np.zeros(2))
    runner.release(3)
    assert result(lonely) == 2
    assert Counter(batch.dtype.name for batch in runner.batches[:3]) == {"float64": 2, "float32": 1}


@reproducible
@given(
    costs=st.lists(st.integers(1, MAX), min_size=1, max_size=40),
    devices=st.integers(1, 3),
    weights=st.sampled_from([(1,), (3, 1)]),
)
def test_with_several_devices_and_classes_the_backlog_needs_no_more_batches(
    costs: list[int], devices: int, weights: tuple[int, ...]
) -> None:
    """Property 8: whichever device takes them, the queued requests run in no more batches than
    promised.
    """
    queue = RequestQueue(
        BatcherSettings(
            MAX,
            0.0,
            max_queue_size=10_000,
            max_queue_bytes=1 << 30,
            devices=devices,
            priority_weights=weights,
        ),
        VirtualClock(),
    )
    for at, rows_of_one in enumerate(costs):
        request = request_of(np.zeros((rows_of_one, 1)), Recorder(), one_row=False)
        request.rank = at % len(weights)
        queue.put([request])
    batches = 0
    while queue.sizes().queued:
        work = queue.poll(batches % devices)
        assert isinstance(work, BatchAssignment)
        queue.finish(work.batch)
        queue.batch_done(work.batch, None, device=batches % devices)
        batches += 1
    assert batches <= math.ceil(sum(costs) / (MAX - max(costs) + 1))
