"""Servers of one client, the connections to them, and the choice among these.

A client of one target has one endpoint. gRPC itself balances over a list of IP addresses in plain
text, so such a list is one endpoint, too. All other lists have an endpoint for each target,
because gRPC resolves one name per channel, and verifies one name with TLS.

A connection reaches one process of a server, so an endpoint of several processes has several.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from tensorferry.client.connection.channel import ChannelOptions, open_channel, stream_options
from tensorferry.client.connection.target import address_list
from tensorferry.protos import inference_pb2_grpc

# Time after a failure until a call tries the endpoint again.
_DOWN_SECONDS = 5.0
# Bound on an attempt to connect, so that a host that drops packets does not hold a call for the
# 20 seconds that are gRPC's default.
_CONNECT_MS = 5000
# Most connections to an endpoint that a caller may ask for.
MOST_CONNECTIONS = 64
# Connections for each process of a server, because the kernel chooses the process of each by a
# hash, and few connections may leave processes without one; and the most for all processes.
_FOR_EACH_PROCESS = 4
_FOR_ALL_PROCESSES = 32


class Connection:
    """Channels to one endpoint: one for calls, one for streams. Each connects with its first call."""

    def __init__(
        self, api: Any, target: str, credentials: grpc.ChannelCredentials | None, options: ChannelOptions
    ) -> None:
        self.channel = open_channel(api, target, credentials, options)
        self.stream_channel = open_channel(api, target, credentials, stream_options(options))
        self.stub = inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.stream_stub = inference_pb2_grpc.GRPCInferenceServiceStub(self.stream_channel)


class Endpoints:
    """Connections in rotation, without endpoints that failed within the last seconds. Thread-safe.

    Each of `openers` opens a connection to one endpoint. All endpoints have equally many, and the
    endpoints alternate in the rotation.

    A failed endpoint is given to one call after `_DOWN_SECONDS`, and returns to the rotation with
    an answer. If all have failed, the one whose failure is the oldest is next.
    """

    def __init__(
        self,
        openers: Sequence[Callable[[], Connection]],
        connections: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._openers = tuple(openers)
        self._clock = clock
        # Guards the four below; _all may be read without it. While it is held, only the clock is
        # called, and channels are opened, which does not connect them.
        self._lock = threading.Lock()
        # The connection at a place belongs to the endpoint of that place modulo the number of endpoints.
        self._all: tuple[Connection, ...] = ()
        self._next = 0
        # Failed endpoints, by their place: the time from which one call may try it.
        self._retry_at: dict[int, float] = {}
        self._closed = False
        self.grow(connections)

    def __iter__(self) -> Iterator[Connection]:
        """Return one connection to each endpoint."""
        return iter(self._all[: len(self._openers)])

    def __len__(self) -> int:
        return len(self._openers)

    @property
    def of_processes(self) -> bool:
        """Whether endpoints have several connections, because their servers have several processes."""
        return len(self._all) > len(self._openers)

    def grow(self, connections: int) -> None:
        """Open connections until each endpoint has this many; do nothing after `close`."""
        with self._lock:
            places = range(len(self._all), connections * len(self._openers))
            if places and not self._closed:
                self._next = len(self._all)
                self._all += tuple([self._openers[place % len(self._openers)]() for place in places])

    def close(self) -> tuple[Connection, ...]:
        """Open no further connection, and return all, whose channels the caller closes."""
        with self._lock:
            self._closed = True
            return self._all

    def pick(self, last: Connection | None = None) -> Connection:
        """Return the connection of the next attempt: of several, another one than that of the last attempt."""
        if len(self._all) == 1:
            return self._all[0]
        with self._lock:
            now = self._clock()
            count, endpoints = len(self._all), len(self._openers)
            turns = range(self._next, self._next + count)
            usable = (
                turn
                for turn in turns
                if self._all[turn % count] is not last and self._retry_at.get(turn % endpoints, now) <= now
            )
            turn = next(usable, None)
            if turn is None:
                turn = min(turns, key=lambda one: self._retry_at.get(one % endpoints, now))
            self._next = (turn + 1) % count
            if turn % endpoints in self._retry_at:
                self._retry_at[turn % endpoints] = now + _DOWN_SECONDS
            return self._all[turn % count]

    def failed(self, connection: Connection, *, sent: bool) -> bool:
        """Take the connection's endpoint out of the rotation; return whether another one is in it.

        An endpoint with several connections stays in it if the call was `sent`, because only one
        process of the server may have ended. The connection then reconnects to another process.
        """
        endpoints = len(self._openers)
        if endpoints == 1 or (sent and len(self._all) > endpoints):
            return False
        with self._lock:
            self._retry_at[self._all.index(connection) % endpoints] = self._clock() + _DOWN_SECONDS
            return len(self._retry_at) < endpoints

    def answered(self, connection: Connection) -> None:
        """Return the connection's endpoint to the rotation."""
        # Without failures, the lock is not needed.
        if self._retry_at:
            with self._lock:
                self._retry_at.pop(self._all.index(connection) % len(self._openers), None)


def open_endpoints(
    targets: Sequence[str],
    credentials: grpc.ChannelCredentials | None,
    options: ChannelOptions,
    connections: int,
    api: Any,
) -> Endpoints:
    """Return the endpoints of the targets; `options` overrides what balancing adds. `api` is `grpc` or `grpc.aio`."""
    extra: ChannelOptions = ()
    if len(targets) > 1:
        addresses = None if credentials is not None else address_list(targets)
        if addresses is not None:
            targets, extra = [addresses], [("grpc.lb_policy_name", "round_robin")]
        else:
            extra = [("grpc.min_reconnect_backoff_ms", _CONNECT_MS)]
    options = list({**dict(extra), **dict(options)}.items())
    openers = [functools.partial(Connection, api, target, credentials, options) for target in targets]
    return Endpoints(openers, connections)


def connections_for(processes: int) -> int:
    """Return the number of connections to an endpoint whose server has this many processes."""
    return 1 if processes == 1 else min(_FOR_EACH_PROCESS * processes, _FOR_ALL_PROCESSES)
