"""`batch_started` says which requests may have run: it is called before each run with the requests of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from batcher.conftest import Busy, Make
from support.batcher.rig import enqueue, fails_below_zero

from tensorferry.batcher import Request


def test_each_run_is_announced_before_it_and_at_its_end(busy: Busy) -> None:
    events: list[tuple[str, Any]] = []

    def model(x: Any) -> Any:
        events.append(("run", x.tolist()))
        return fails_below_zero(x)

    def started(batch: Sequence[Request]) -> Callable[[], None]:
        tags = [request.tag for request in batch]
        events.append(("started", tags))
        return lambda: events.append(("ended", tags))

    batcher, runner = busy(model, batch_started=started)
    recorders = []
    for value in (1.0, -2.0):
        request, recorder = enqueue(batcher, [value])
        request.tag = value
        recorders.append(recorder)
    runner.open()
    assert [recorder.await_outcome().error is None for recorder in recorders] == [True, False]
    assert events[3:] == [
        ("started", [1.0, -2.0]),
        ("run", [1.0, -2.0]),
        ("ended", [1.0, -2.0]),
        ("started", [1.0]),
        ("run", [1.0]),
        ("ended", [1.0]),
        ("started", [-2.0]),
        ("run", [-2.0]),
        ("ended", [-2.0]),
    ]


def test_parts_of_a_split_request_have_its_owner(make: Make) -> None:
    owners: list[object] = []
    batcher = make(lambda x: x, 2, batch_started=lambda batch: owners.extend(each.owner for each in batch))
    _, recorder = enqueue(batcher, np.arange(5.0), owner="the caller's")
    assert recorder.await_outcome().outputs.tolist() == [0, 1, 2, 3, 4]
    assert owners == ["the caller's"] * 3
