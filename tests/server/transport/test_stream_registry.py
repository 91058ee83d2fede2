"""The registry of open streams, which both gRPC transports use: a drain reaches each."""

from __future__ import annotations

from tensorferry.server.transport.stream_registry import StreamRegistry


class Stream:
    """A stream that counts its drains."""

    def __init__(self) -> None:
        self.drains = 0

    def drain(self) -> None:
        self.drains += 1


def test_a_drain_reaches_open_and_later_streams_once() -> None:
    registry = StreamRegistry(3, lambda code: None)
    ended, early, late = Stream(), Stream(), Stream()
    registry.register(ended)
    registry.unregister(ended)
    registry.register(early)
    registry.begin_drain()
    registry.register(late)
    assert [stream.drains for stream in (ended, early, late)] == [0, 1, 1]
