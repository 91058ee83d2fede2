"""The latency contract: how many batches may start before an accepted request does.

With one row per request and one bucket: the running batches and ⌈rows ahead / max_batch_size⌉ more.
Requests of up to r rows can leave r - 1 places of a batch empty, so the divisor is then
max_batch_size - r + 1. Requests that cannot share a batch are counted by bucket.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import Recorder, new_request, reproducible

from tensorferry.batcher import Request
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import VirtualClock

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
    queue = RequestQueue(BatcherSettings(MAX), clock)
    waiting: list[Promise] = []
    batches = 0
    for size, kind in [*steps, *[(0, False)] * len(steps)]:
        if size:
            width = 1 + (kind and kinds == 2)
            request = new_request(np.zeros((min(size, most_rows), width)), Recorder())
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
