"""The count of open calls, for which a stopping server waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from polling import PATIENCE

from tensorferry.server.transport.open_calls import OpenCalls


class Context:
    """A call's context; the test ends the call."""

    def __init__(self, *, over: bool = False) -> None:
        self._over = over
        self.callbacks: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        if self._over:
            return False
        self.callbacks.append(callback)
        return True


def test_the_wait_ends_with_the_last_call() -> None:
    calls = OpenCalls()
    assert calls.wait_until_none(0)
    contexts: list[Any] = [Context(), Context()]
    for context in contexts:
        calls.begin()
        calls.end_with(context)
    contexts[0].callbacks[0]()
    assert not calls.wait_until_none(0)
    waiting = threading.Thread(target=calls.wait_until_none, args=(PATIENCE,))
    waiting.start()
    contexts[1].callbacks[0]()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert calls.wait_until_none(0)


def test_a_call_that_is_over_already_is_not_counted() -> None:
    calls = OpenCalls()
    over: Any = Context(over=True)
    calls.begin()
    calls.end_with(over)
    assert calls.count == 0


def test_a_call_above_the_limit_is_not_counted() -> None:
    calls = OpenCalls()
    assert calls.begin(2)
    assert calls.begin(2)
    assert not calls.begin(2)
    assert calls.count == 2
    calls.end()
    assert calls.begin(2)
