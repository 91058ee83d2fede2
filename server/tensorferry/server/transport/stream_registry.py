"""The open streams of one transport: their limit and their drain."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from tensorferry.server.status import Status, StatusCode


class DrainableStream(Protocol):
    """An open stream."""

    def drain(self) -> None:
        """End the stream once every request that was read is answered. Any thread may call this."""


class StreamRegistry:
    """At most `max_streams` open streams. Thread-safe.

    `count_refused` is called with the status code of each stream above the limit.
    """

    def __init__(self, max_streams: int, count_refused: Callable[[StatusCode], None]) -> None:
        self._max_streams = max_streams
        self._count_refused = count_refused
        self._full = Status(
            StatusCode.RESOURCE_EXHAUSTED,
            f"{max_streams} streams are open, which is the most this server keeps; close one, or send several requests in "
            "one stream",
        )
        # Guards _streams and _draining. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._streams: set[DrainableStream] = set()
        self._draining = False

    def register(self, stream: DrainableStream) -> Status | None:
        """Add a stream, or return the status that refuses it. During a drain the stream is drained at once."""
        with self._lock:
            full = len(self._streams) >= self._max_streams
            if not full:
                self._streams.add(stream)
            draining = self._draining
        if full:
            self._count_refused(self._full.code)
            return self._full
        if draining:
            stream.drain()
        return None

    def unregister(self, stream: DrainableStream) -> bool:
        """Remove a stream that has ended; return false if it is not registered."""
        with self._lock:
            registered = stream in self._streams
            self._streams.discard(stream)
        return registered

    def begin_drain(self) -> None:
        """Drain every open stream, and every stream that is registered later."""
        with self._lock:
            self._draining = True
            streams = list(self._streams)
        for stream in streams:
            stream.drain()

    @property
    def open_streams(self) -> int:
        """The number of open streams."""
        with self._lock:
            return len(self._streams)
