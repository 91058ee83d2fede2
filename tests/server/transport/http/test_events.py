"""Responses of events, with clients that read slowly or not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from support.server.http_rig import RawClient, get
from support.server.rig import PATIENCE
from support.server.scripted_service import ScriptedCall

from tensorferry.server.system.addresses import listen_for_http
from tensorferry.server.transport.http import connection as connections
from tensorferry.server.transport.http.connection import Connection, Exchange
from tensorferry.server.transport.http.errors import v2_form
from tensorferry.server.transport.http.heads import Head, Routed
from tensorferry.server.transport.http.server import HttpServer
from tensorferry.server.transport.unread_responses import UnreadResponses

# More than the buffers of a connection take.
LARGE = b"x" * (8 << 20)
LINES = b"Access-Control-Allow-Origin: *\r\nVary: Origin"


class Events:
    """An application that answers each request with these events: the next when one is sent, or all at once."""

    def __init__(self, events: list[bytes], at_once: bool, ends: bool, unread: UnreadResponses) -> None:
        self._events, self._at_once, self._ends, self.unread = events, at_once, ends, unread
        # The most bytes that were unread.
        self.counted = 0
        self.cancelled, self.all_told = threading.Event(), threading.Event()

    def __call__(self, loop: asyncio.AbstractEventLoop, on_loop: Callable[[Any], None]) -> Events:
        self._on_loop = on_loop
        return self

    def route(self, method: str, path: str, fields: Mapping[str, str]) -> Routed:
        return Routed(path, v2_form, LINES)

    def refusal(self, connection: Connection, head: Head) -> None:
        return None

    def max_body_bytes(self, head: Head) -> int:
        return 0

    def serve(self, exchange: Exchange, body: bytes) -> None:
        exchange.submitted(ScriptedCall(self.cancelled.set))
        self._send(exchange, [*self._events])

    def _send(self, exchange: Exchange, events: list[bytes]) -> None:
        while events:
            event = events.pop(0)
            assert exchange.connection.count_unread(len(event)) is None
            self.counted = max(self.counted, self.unread.total)
            if self._at_once:
                exchange.send_event(event, lambda: None)
            else:
                # Later, because an event can be sent within the call.
                exchange.send_event(event, partial(self._on_loop, partial(self._send, exchange, events)))
                return
        self.all_told.set()
        if self._ends:
            exchange.respond(b"")

    def close(self) -> None:
        """Nothing runs."""


Serve = Callable[..., tuple[RawClient, Events]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a client of a server that answers with these events, and the application."""
    with ExitStack() as stack:

        def start(
            events: list[bytes], *, at_once: bool, ends: bool, limit: int = 1 << 30
        ) -> tuple[RawClient, Events]:
            application = Events(events, at_once, ends, UnreadResponses(limit))
            listening = listen_for_http("127.0.0.1", 0)
            server = HttpServer(listening, application, unread=application.unread)
            server.start()
            stack.callback(server.close, 0.0)
            client = RawClient(listening.getsockname()[1])
            stack.callback(client.close)
            return client, application

        yield start


def rest(client: RawClient) -> bytes:
    """Return what the server sends until it ends the connection."""
    data = bytearray()
    while part := client.socket.recv(1 << 16):
        data += part
    return bytes(data)


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_a_connection_that_ends_with_its_response_ends_after_the_last_event(
    serve: Serve, version: bytes
) -> None:
    client, _ = serve([LARGE, b"second", b"third"], at_once=False, ends=True)
    client.send(get("/", Connection="close").replace(b"HTTP/1.1", version))
    answer = rest(client)
    assert LARGE in answer
    assert b"second" in answer
    assert answer.endswith(b"third" if version == b"HTTP/1.0" else b"5\r\nthird\r\n0\r\n\r\n")


def test_a_response_of_events_has_the_headers_of_its_route_once(serve: Serve) -> None:
    client, _ = serve([b"first", b"second"], at_once=True, ends=True)
    client.send(get("/", Connection="close"))
    head, _, events = rest(client).partition(b"\r\n\r\n")
    assert head.count(LINES) == 1
    assert events == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"


def test_a_client_that_reads_no_events_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_IDLE_SECONDS", 1.0)
    monkeypatch.setattr("tensorferry.server.transport.http.server._SWEEP_SECONDS", 0.01)
    client, application = serve([LARGE, b"late"], at_once=False, ends=False)
    client.send(get("/"))
    assert application.cancelled.wait(PATIENCE)
    # Also of an event that comes after the end.
    assert application.all_told.wait(PATIENCE)
    assert (application.counted, application.unread.total) == (len(LARGE), 0)


def test_events_that_are_unsent_at_the_end_are_counted_once(serve: Serve) -> None:
    """Together they are more than half of what a connection may have, a quarter of the limit."""
    client, _ = serve([LARGE, b"last"], at_once=True, ends=True, limit=40 << 20)
    client.send(get("/", Connection="close"))
    assert rest(client).endswith(b"4\r\nlast\r\n0\r\n\r\n")
