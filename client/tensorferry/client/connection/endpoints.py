"""Servers of one client, and the choice among them.

A client of one target has one endpoint. gRPC itself balances over a list of IP addresses in plain
text, so such a list is one endpoint, too. All other lists have an endpoint for each target,
because gRPC resolves one name per channel, and verifies one name with TLS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from tensorferry.client.connection import channel
from tensorferry.client.connection.target import address_list
from tensorferry.protos import inference_pb2_grpc

# Time after a failure until a call tries the endpoint again.
_DOWN_SECONDS = 5.0
# Bound on an attempt to connect, so that a host that drops packets does not hold a call for the
# 20 seconds that are gRPC's default.
_CONNECT_MS = 5000

OpenChannel = Callable[[str, grpc.ChannelCredentials | None, list[tuple[str, str | int]]], Any]


class Endpoint:
    """Channels to one target: one for calls, one for streams. Each connects with its first call."""

    def __init__(
        self,
        target: str,
        open_channel: OpenChannel,
        credentials: grpc.ChannelCredentials | None,
        options: list[tuple[str, str | int]],
    ) -> None:
        self.channel = open_channel(target, credentials, options)
        self.stream_channel = open_channel(target, credentials, channel.stream_options(options))
        self.stub = inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.stream_stub = inference_pb2_grpc.GRPCInferenceServiceStub(self.stream_channel)


class Endpoints:
    """Endpoints in rotation, without those that failed within the last seconds. Thread-safe.

    A failed endpoint is given to one call after `_DOWN_SECONDS`, and returns to the rotation with
    an answer. If all have failed, the one whose failure is the oldest is next.
    """

    def __init__(self, endpoints: Sequence[Endpoint], clock: Callable[[], float] = time.monotonic) -> None:
        self._all = tuple(endpoints)
        self._clock = clock
        # Guards _next and _retry_at. Only the clock is called while it is held.
        self._lock = threading.Lock()
        self._next = 0
        # Failed endpoints, by their place: the time from which one call may try it.
        self._retry_at: dict[int, float] = {}

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def pick(self) -> Endpoint:
        """Return the endpoint of the next attempt."""
        if len(self._all) == 1:
            return self._all[0]
        with self._lock:
            now = self._clock()
            places = [(self._next + step) % len(self._all) for step in range(len(self._all))]
            usable = (place for place in places if self._retry_at.get(place, now) <= now)
            place = next(usable, None)
            if place is None:
                place = min(places, key=self._retry_at.__getitem__)
            self._next = place + 1
            if place in self._retry_at:
                self._retry_at[place] = now + _DOWN_SECONDS
            return self._all[place]

    def failed(self, endpoint: Endpoint) -> bool:
        """Take the endpoint out of the rotation; return whether another one is in it."""
        if len(self._all) == 1:
            return False
        with self._lock:
            self._retry_at[self._all.index(endpoint)] = self._clock() + _DOWN_SECONDS
            return len(self._retry_at) < len(self._all)

    def answered(self, endpoint: Endpoint) -> None:
        """Return the endpoint to the rotation."""
        # Without failures, the lock is not needed.
        if self._retry_at:
            with self._lock:
                self._retry_at.pop(self._all.index(endpoint), None)


def open_endpoints(
    targets: Sequence[str],
    open_channel: OpenChannel,
    credentials: grpc.ChannelCredentials | None,
    options: list[tuple[str, str | int]],
) -> Endpoints:
    """Return the endpoints of the targets; `options` overrides what balancing adds."""
    extra: list[tuple[str, str | int]] = []
    if len(targets) > 1:
        addresses = None if credentials is not None else address_list(targets)
        if addresses is not None:
            targets, extra = [addresses], [("grpc.lb_policy_name", "round_robin")]
        else:
            extra = [("grpc.min_reconnect_backoff_ms", _CONNECT_MS)]
    given = {name for name, _ in options}
    options = options + [option for option in extra if option[0] not in given]
    return Endpoints([Endpoint(target, open_channel, credentials, options) for target in targets])
