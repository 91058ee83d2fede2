"""Servers under attack, and a good client beside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzz.attackers.attacks import MAX_MESSAGE_BYTES
from fuzz.attackers.wire import Wire
from polling import until


@pytest.fixture(scope="module")
def wire(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A server that all tests of a transport attack."""
    made = Wire(tmp_path_factory.mktemp("attacked"), transport)
    try:
        yield made
        # malloc keeps part of the largest messages' memory, and core keeps part of the memory of
        # waiting calls.
        made.close(more_memory_kb=6 * MAX_MESSAGE_BYTES >> 10)
    finally:
        made.server.stop()


@pytest.fixture
def good_client(wire: Wire) -> Iterator[None]:
    """A client that must be answered before and after each attack."""
    until(wire.answers_good)
    yield
    until(wire.answers_good)
    assert wire.server.process.poll() is None
    assert not wire.server.errors()
