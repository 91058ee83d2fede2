"""The registry of open streams, which both gRPC transports use: limit and drain."""

from __future__ import annotations

import grpc

from tensorferry.server.transport.stream_registry import StreamRegistry


class Stream:
    """A stream that counts its drains."""

    def __init__(self) -> None:
        self.drains = 0

    def drain(self) -> None:
        self.drains += 1


def test_a_stream_above_the_limit_is_refused_and_counted() -> None:
    refused: list[grpc.StatusCode] = []
    registry = StreamRegistry(1, refused.append)
    first, second = Stream(), Stream()
    assert registry.register(first) is None
    status = registry.register(second)
    assert status is not None
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused == [grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert registry.open_streams == 1
    assert not registry.unregister(second)
    assert registry.unregister(first)
    assert not registry.unregister(first)
    assert registry.register(second) is None


def test_a_drain_reaches_open_and_later_streams_once() -> None:
    registry = StreamRegistry(3, lambda code: None)
    ended, early, late = Stream(), Stream(), Stream()
    registry.register(ended)
    registry.unregister(ended)
    registry.register(early)
    registry.begin_drain()
    registry.register(late)
    assert [stream.drains for stream in (ended, early, late)] == [0, 1, 1]
