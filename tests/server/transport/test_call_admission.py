"""The count of open calls, with which a drain waits."""

from __future__ import annotations

import threading

from support.server.rig import PATIENCE

from tensorferry.server.transport.transport_state import OpenCalls


def test_the_wait_for_open_calls_ends_with_the_last() -> None:
    calls = OpenCalls(most=1)
    assert calls.wait_until_none(0)
    assert calls.begin_unary()
    calls.begin_stream()
    calls.end_unary()
    assert not calls.wait_until_none(0)
    assert calls.begin_unary()
    calls.end_stream()
    assert not calls.wait_until_none(0)
    waiting = threading.Thread(target=calls.wait_until_none, args=(PATIENCE,))
    waiting.start()
    calls.end_unary()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert calls.wait_until_none(0)
