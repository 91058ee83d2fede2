"""The end of a server waits for calls until each is over, and no longer than it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from polling import PATIENCE

from tensorferry.server.transport.calls_in_progress import Underway, Until


class Context:
    """A call's, of which a test says when it is over."""

    def __init__(self, *, over: bool = False) -> None:
        self._over = over
        self.ends: list[Callable[[], None]] = []

    def add_callback(self, end: Callable[[], None]) -> bool:
        if self._over:
            return False
        self.ends.append(end)
        return True


def test_it_waits_for_every_call() -> None:
    underway = Underway()
    assert underway.wait(0)
    calls: list[Any] = [Context(), Context()]
    for call in calls:
        underway.add(call)
    calls[0].ends[0]()
    assert not underway.wait(0)
    waiting = threading.Thread(target=underway.wait, args=(PATIENCE,))
    waiting.start()
    calls[1].ends[0]()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert underway.wait(0)


def test_a_call_that_is_over_is_not_waited_for() -> None:
    underway = Underway()
    over: Any = Context(over=True)
    underway.add(over)
    assert underway.wait(0)


def test_until_is_told() -> None:
    open_calls = ["one"]
    until = Until(lambda: not open_calls)
    assert not until.wait(0)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(until.wait(PATIENCE)))
    waiting.start()
    open_calls.clear()
    until.changed()
    waiting.join(PATIENCE)
    assert found == [True]
