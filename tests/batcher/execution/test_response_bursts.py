"""The burst hook is called before and after the answers of a batch of several requests."""

from __future__ import annotations

import threading
from typing import Any

from batcher.conftest import Make
from support.batcher.rig import PATIENCE, Recorder, enqueue, occupy

from tensorferry.batcher import Outcome
from tensorferry.batcher.testing import ScriptedRunner


class Journal:
    """A hook that records its calls and the outcomes between them, in order."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.ended = threading.Semaphore(0)

    def begin(self, count: int) -> None:
        self._begun = ("begin", count)
        self.entries.append(self._begun)

    def end(self) -> None:
        self.entries.append(("end", self._begun))
        self.ended.release()

    def note(self, outcome: Outcome) -> None:
        self.entries.append("answer" if outcome.error is None else type(outcome.error).__name__)


class Noting(Recorder):
    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def __call__(self, outcome: Outcome) -> None:
        self._journal.note(outcome)
        super().__call__(outcome)


def test_the_answers_of_a_batch_are_between_begin_and_end(make: Make, runner: ScriptedRunner) -> None:
    journal = Journal()
    batcher = make(runner, 4, response_hook=journal)
    first = occupy(batcher, runner)
    requests = [enqueue(batcher, [float(x)])[0] for x in range(3)]
    recorders = [Noting(journal) for _ in requests]
    for request, recorder in zip(requests, recorders, strict=True):
        request.complete = recorder
    runner.release()
    assert first.result(PATIENCE) == 0.0
    # A batch of one request is no burst.
    assert not journal.entries
    runner.await_batches(2)
    runner.release()
    assert journal.ended.acquire(timeout=PATIENCE)
    assert journal.entries == [("begin", 3), "answer", "answer", "answer", ("end", ("begin", 3))]


def test_a_bug_between_two_answers_leaves_no_request_unanswered(make: Make, runner: ScriptedRunner) -> None:
    """Earlier answers are sent, and later requests fail."""
    journal = Journal()
    batcher = make(runner, 4, response_hook=journal)
    occupy(batcher, runner)
    requests = [enqueue(batcher, [float(x)])[0] for x in range(3)]
    recorders = [Noting(journal) for _ in requests]
    for request, recorder in zip(requests, recorders, strict=True):
        request.complete = recorder

    # It is read only when the last of them is answered.
    del requests[-1].priority
    runner.release()
    runner.await_batches(2)
    runner.release()
    for recorder in recorders:
        recorder.await_outcome()
    assert journal.ended.acquire(timeout=PATIENCE)
    kinds = ["begin" if type(entry) is tuple and entry[0] == "begin" else entry for entry in journal.entries]
    end = ("end", ("begin", 3))
    assert kinds == ["begin", "answer", "answer", "BatcherError", end]
