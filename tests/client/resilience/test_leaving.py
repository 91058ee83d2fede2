"""A stream whose server ends during a write gets an error and does not hang."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from client.resilience.leaving import CLIENTS, LEAVINGS, Leaving, LeavingServer


@pytest.mark.parametrize("stream", CLIENTS)
@pytest.mark.parametrize("leaving", LEAVINGS, ids=lambda leaving: "-".join(leaving.steps))
def test_a_stream_ends_when_its_server_leaves(
    leaving: Leaving, stream: Callable[[str, int, int], str]
) -> None:
    server = LeavingServer(leaving)
    assert stream(server.target, 1 if leaving.after < 2 else 100, 100) == "UNAVAILABLE"
    server.close()
