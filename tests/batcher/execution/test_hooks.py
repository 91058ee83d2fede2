"""The callers' hooks: `batch_started` around each run of a batch, the burst hook around the answers of several requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from batcher.conftest import Busy
from support.batcher.rig import PATIENCE, enqueue, fails_below_zero, new_request

from tensorferry.batcher import Outcome, Request


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


class Journal:
    """A hook that records its calls and the outcomes between them, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.ended = threading.Semaphore(0)

    def begin(self, count: int) -> None:
        self.entries.append(f"begin {count}")

    def end(self) -> None:
        self.entries.append("end")
        self.ended.release()

    def note(self, outcome: Outcome) -> None:
        self.entries.append("answer" if outcome.error is None else type(outcome.error).__name__)


@pytest.mark.parametrize("bug", [False, True])
def test_the_answers_of_a_batch_are_between_begin_and_end(busy: Busy, bug: bool) -> None:
    """After a bug between two answers, too: earlier answers are sent, and later requests fail."""
    journal = Journal()
    batcher, runner = busy(None, 4, response_hook=journal)
    requests = [new_request([float(x)], journal.note) for x in range(3)]
    for request in requests:
        batcher.enqueue(request)
    if bug:
        # It is read only when the last of them is answered.
        del requests[-1].priority
    runner.release(2)
    assert journal.ended.acquire(timeout=PATIENCE)
    # The batch of one request before them is no burst.
    assert journal.entries == ["begin 3", "answer", "answer", "BatcherError" if bug else "answer", "end"]
