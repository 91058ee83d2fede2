"""A row is charged once, even if its device failed and it runs again."""

from __future__ import annotations

from collections.abc import Sequence

from batcher.conftest import Make
from support.batcher.rig import Recorder, new_request, rows

from tensorferry.batcher import ClientPolicy, InstanceFailed
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

FAIR = ClientPolicy(fair=True)
MOST = 4


def test_a_requeued_request_is_not_charged_again(make: Make, clock: VirtualClock) -> None:
    """The requests of a failed batch run again at once, and their client is charged as if the batch
    had not failed.
    """
    failures = [InstanceFailed("the device is broken")]

    def model_fn(x: object) -> object:
        if failures and len(runner.batches) == 2:
            raise failures.pop()
        return x

    runner = ScriptedRunner(model_fn, gated=True)
    batcher = make(runner, MOST, clients=FAIR, clock=clock)
    recorders: list[Recorder] = []

    def send(client: str, tags: Sequence[int]) -> None:
        for tag in tags:
            recorders.append(Recorder())
            request = new_request([float(tag)], recorders[-1])
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
