"""One connection of HTTP/1.1: requests are read one after the other, and each is answered before the next is read."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensorferry.server.errors import UnreadResponsesError
from tensorferry.server.inference.reply import InferenceCall
from tensorferry.server.security.access_control import ClientCertificate
from tensorferry.server.security.tls import client_certificate
from tensorferry.server.transport.http.answers import (
    LAST_CHUNK,
    chunk,
    error_response,
    head_of_events,
    with_header,
    without_body,
)
from tensorferry.server.transport.http.bodies import ChunkedBody, SizedBody, too_large
from tensorferry.server.transport.http.errors import HttpError, v2_form
from tensorferry.server.transport.http.heads import MAX_HEAD_BYTES, Head
from tensorferry.server.transport.unread_responses import ResponseAccount

if TYPE_CHECKING:
    from tensorferry.server.transport.http.server import HttpServer

# A head must arrive within this time, and a body within the same time and what it takes at the least rate.
_ARRIVAL_SECONDS, _LEAST_BYTES_PER_SECOND = 30.0, 64 << 10
# A connection without a request is closed after this time, as nginx does.
_IDLE_SECONDS = 75.0
# A connection without a request may get its first one for so long, also while the server drains: a client has just made it.
_NEW_SECONDS = 1.0
# After an error before the end of a request, its rest is read, so that the client reads the answer before a reset.
_DISCARD_BYTES, _DISCARD_SECONDS = 1 << 20, 2.0
# Bytes of further requests that are kept while one is answered.
_PIPELINED_BYTES = 64 << 10
# An answer is written in slices, so that the rest of one that the client does not read can be counted, also behind TLS.
_SLICE_BYTES = 256 << 10
_EMPTY_LINES = re.compile(rb"(?:\r\n)*+")
_HTTP2, _TLS = b"PRI * HTTP/2.0\r\n", b"\x16\x03"


class Exchange:
    """A request that is being answered. `respond` is called once, on the loop's thread."""

    __slots__ = ("_call", "_left", "connection", "has_events", "head")

    def __init__(self, connection: Connection, head: Head) -> None:
        self.connection = connection
        self.head = head
        self._call: InferenceCall | None = None
        self._left = False
        # Whether the response has begun, with an event.
        self.has_events = False

    def submitted(self, call: InferenceCall) -> None:
        """Note the request in flight, which is cancelled if the client leaves. Called on any thread."""
        self._call = call
        if self._left:
            call.cancel()

    def left(self) -> None:
        """Cancel the request, because the client has left."""
        self._left = True
        if self._call is not None:
            self._call.cancel()

    def respond(self, data: bytes) -> None:
        """Send the response, or the last event, if any, and the end of a response of events, unless the client has left."""
        self.connection.respond(self, data)

    def send_event(self, data: bytes, sent: Callable[[], None]) -> None:
        """Send an event that was counted. Call `sent` when it is sent, or will never be."""
        self.connection.send_event(self, data, sent)
        self.has_events = True


class Connection(asyncio.Protocol):
    """Reads requests from one connection and writes their answers. All methods run on the loop's thread."""

    def __init__(self, owner: HttpServer) -> None:
        self._owner = owner
        self._application = owner.application
        self._transport: Any = None
        # The address without the port, and with it as gRPC writes it.
        self.address, self.peer = "", "unix:"
        # Bytes that belong to no request yet.
        self._data = b""
        # The request whose body arrives.
        self._arriving: tuple[Head, ChunkedBody | SizedBody] | None = None
        self._exchange: Exchange | None = None
        # When the connection became idle, or its current request began to arrive.
        self._since = time.monotonic()
        self._allowed_seconds = _IDLE_SECONDS
        # Those bytes of an answer that `_account` has, because the client did not read them at once.
        self._counted = 0
        # The bytes of each event that is written and not sent, and what to call then.
        self._unsent_events: list[tuple[int, Callable[[], None]]] = []
        self._writes_wait = False
        # The part of an answer that is not written yet, and the bytes that the last sweep found unsent.
        self._rest: memoryview | None = None
        self._unsent = 0
        # Whether the connection is closed once everything is sent, and whether a request has arrived.
        self._ends = self._served = False
        # Bytes that may still be read and thrown away before the connection is closed; None while it is in use.
        self._discard: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        # So that `resume_writing` means that everything is sent. Not high=0, with which TLS pauses an empty buffer.
        self._transport.set_write_buffer_limits(high=1, low=0)
        address = transport.get_extra_info("peername")
        if isinstance(address, tuple):
            host, port = address[:2]
            self.address = host
            self.peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        on_loop, abort = self._owner.on_loop, self._transport.abort
        # Of events until they are sent, and of answers that the client does not read. It does not refer to the connection: in a
        # cycle, an unfinished body would stay in memory until the next garbage collection.
        self._account = ResponseAccount(self.peer, lambda error: on_loop(abort))
        if not self._owner.opened(self):
            self._fail(
                HttpError(
                    503, "too many connections; retry, or start the server with a larger --max-connections"
                )
            )

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`. The request in flight is cancelled."""
        self._owner.closed(self)
        self._owner.unread.close(self._account)
        # So that `sent` of a later event is called at once.
        self._writes_wait = False
        self._events_sent()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.left()

    @property
    def certificate(self) -> ClientCertificate:
        """The client's certificate, as gRPC has it."""
        return client_certificate(self._transport.get_extra_info("ssl_object"))

    @property
    def idle(self) -> bool:
        """Whether no request is answered or arrives."""
        return self._exchange is None and self._arriving is None and not self._data

    @property
    def is_new(self) -> bool:
        """Whether the client has just connected, and sent nothing yet."""
        return self.idle and not self._served and time.monotonic() - self._since < _NEW_SECONDS

    @property
    def busy(self) -> bool:
        """Whether a request is being answered, or an answer is not sent to its end."""
        return self._exchange is not None or self._unsent_bytes > 0

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._discard is not None:
            self._discard -= len(data)
            if self._discard < 0:
                self._close()
        elif self._arriving is not None:
            self._take_body(data, *self._arriving)
        elif self._exchange is not None or self._writes_wait:
            self._data += data
            if len(self._data) > _PIPELINED_BYTES:
                self._transport.pause_reading()
        else:
            self._next(self._data + data)

    def _next(self, data: bytes) -> None:
        """Begin with the next request, which `data` begins with."""
        if data.startswith(b"\r\n"):
            # Empty lines before a request are allowed (RFC 9112, section 2.2).
            data = _EMPTY_LINES.sub(b"", data, 1)
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._await_head(data)
            return
        self._data = b""
        try:
            head = self._owner.heads.get(data[:end])
        except HttpError as error:
            self._fail(self._explained(error, data))
            return
        most = self._application.max_body_bytes(head)
        if head.length > most:
            self._fail(too_large(str(head.length), most), head)
            return
        stop = end + head.length
        if head.chunked or len(data) < stop:
            self._await_body(head, data[end:])
        else:
            self._complete(head, data[end:stop], data[stop:])

    def _await_head(self, data: bytes) -> None:
        if not self._data and data:
            self._started(_ARRIVAL_SECONDS)
        self._data = data
        if len(data) > MAX_HEAD_BYTES:
            self._fail(HttpError(431, f"the headers have more than {MAX_HEAD_BYTES} bytes"))
        elif b"\n\n" in data or data.startswith(_TLS):
            self._fail(self._explained(HttpError(400, "the head is malformed"), data))

    def _await_body(self, head: Head, data: bytes) -> None:
        refusal = self._application.refusal(self, head)
        if refusal is not None:
            self._fail(refusal, head)
            return
        most = self._application.max_body_bytes(head)
        length = most if head.chunked else head.length
        self._started(_ARRIVAL_SECONDS + length / _LEAST_BYTES_PER_SECOND)
        if head.expects_continue and not data:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = ChunkedBody(most) if head.chunked else SizedBody(length)
        self._arriving = head, body
        self._take_body(data, head, body)

    def _take_body(self, data: bytes, head: Head, body: ChunkedBody | SizedBody) -> None:
        try:
            complete = body.feed(data)
        except HttpError as error:
            self._fail(error, head)
            return
        if complete is not None:
            self._arriving = None
            self._complete(head, *complete)

    def _complete(self, head: Head, body: bytes, rest: bytes) -> None:
        self._data = rest
        self._served = True
        self._exchange = exchange = Exchange(self, head)
        self._application.serve(exchange, body)

    def respond(self, exchange: Exchange, data: bytes) -> None:
        """Send a response; see `Exchange.respond`."""
        if self._exchange is not exchange or self._transport.is_closing():
            return
        self._exchange = None
        head = exchange.head
        if exchange.has_events:
            data = data if head.is_old else chunk(data) + LAST_CHUNK
        else:
            data = self._with_headers(head, data)
        self._started(_IDLE_SECONDS)
        if len(data) <= _SLICE_BYTES:
            self._transport.write(data)
        else:
            self._rest = memoryview(data)
            self._write_rest()
        if self._writes_wait:
            self._count_unsent()
        elif self._ends:
            self._close()
        elif self._data:
            # Not at once, because thousands of short requests may have arrived together.
            self._owner.on_loop(self._continue)

    def _with_headers(self, head: Head, data: bytes) -> bytes:
        self._ends = not head.keep_alive or self._owner.draining
        if self._ends:
            data = with_header(data, b"Connection: close")
        if head.is_plain:
            return data
        if head.is_old and not self._ends:
            # Without this, such a client waits for the end of the connection.
            data = with_header(data, b"Connection: keep-alive")
        data = with_header(data, head.lines)
        return without_body(data) if head.method == "HEAD" else data

    def count_unread(self, nbytes: int) -> UnreadResponsesError | None:
        """Count an event that will be sent, or return why it must not be kept. Called on any thread."""
        return self._owner.unread.add(self._account, nbytes)

    def send_event(self, exchange: Exchange, data: bytes, sent: Callable[[], None]) -> None:
        """Send an event; see `Exchange.send_event`."""
        if self._exchange is exchange and not self._transport.is_closing():
            if not exchange.has_events:
                self._transport.write(self._head_of_events(exchange.head))
            self._transport.write(data if exchange.head.is_old else chunk(data))
        self._unsent_events.append((len(data), sent))
        if not self._writes_wait:
            self._events_sent()

    def _head_of_events(self, head: Head) -> bytes:
        self._ends = not head.keep_alive or head.is_old or self._owner.draining
        return with_header(head_of_events(chunked=not head.is_old, closes=self._ends), head.lines)

    def _events_sent(self) -> None:
        events, self._unsent_events = self._unsent_events, []
        for nbytes, sent in events:
            self._owner.unread.remove(self._account, nbytes)
            sent()

    def _write_rest(self) -> None:
        while self._rest is not None and not self._writes_wait:
            part, rest = self._rest[:_SLICE_BYTES], self._rest[_SLICE_BYTES:]
            self._rest = rest if rest else None
            self._transport.write(part)

    def _continue(self) -> None:
        """Read the next request, or one that has arrived meanwhile."""
        if self._data and self._exchange is None and self._arriving is None and not self._writes_wait:
            data, self._data = self._data, b""
            self._transport.resume_reading()
            self._next(data)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client has not read everything."""
        self._writes_wait = True
        self._started(_IDLE_SECONDS)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`: everything that was written is sent."""
        self._writes_wait = False
        self._events_sent()
        self._write_rest()
        read = min(_SLICE_BYTES, self._counted) if self._writes_wait else self._counted
        self._owner.unread.remove(self._account, read)
        self._counted -= read
        if self._writes_wait or self._exchange is not None:
            # More is written, or further events follow.
            return
        # Soon, because asyncio would end the connection twice if it were closed within this call.
        if self._ends or (self._owner.draining and self.idle):
            self._owner.on_loop(self._close)
        elif self._discard is None:
            self._owner.on_loop(self._continue)

    def _count_unsent(self) -> None:
        # Events are counted before they are sent.
        events = sum(nbytes for nbytes, _ in self._unsent_events)
        self._counted = max(0, self._unsent_bytes - events)
        if self._owner.unread.add(self._account, self._counted) is not None:
            self._transport.abort()

    @property
    def _unsent_bytes(self) -> int:
        waiting: int = self._transport.get_write_buffer_size()
        return waiting + (0 if self._rest is None else len(self._rest))

    def _fail(self, error: HttpError, head: Head | None = None) -> None:
        """Answer a request that cannot be read, and close the connection."""
        form, lines = (v2_form, b"") if head is None else (head.errors, head.lines)
        self._arriving, self._data = None, b""
        data = with_header(error_response(error, form), b"Connection: close")
        self._transport.write(with_header(data, lines))
        self._discard = _DISCARD_BYTES
        self._started(_DISCARD_SECONDS)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _explained(self, error: HttpError, data: bytes) -> HttpError:
        """Return the error of a client that speaks another protocol."""
        if data.startswith(_HTTP2):
            return HttpError(400, f"this port speaks HTTP/1.1; gRPC is at {self._owner.grpc_address()}")
        if data.startswith(_TLS):
            return HttpError(
                400,
                "this port is without TLS: use http://, or start the server with --tls-certificate and --tls-key",
            )
        return error

    def _started(self, allowed_seconds: float) -> None:
        self._since, self._allowed_seconds = time.monotonic(), allowed_seconds

    def sweep(self, now: float) -> None:
        """Close the connection if what it waits for takes too long."""
        if self._writes_wait and self._unsent != (unsent := self._unsent_bytes):
            # The client reads.
            self._unsent, self._since = unsent, now
        answering = self._exchange is not None and not self._writes_wait
        if answering or now - self._since < self._allowed_seconds:
            return
        if self._writes_wait:
            self._transport.abort()
        elif self._discard is not None or self.idle:
            self._close()
        else:
            late = HttpError(408, f"the request did not arrive within {self._allowed_seconds:.0f} s")
            self._fail(late, None if self._arriving is None else self._arriving[0])

    def end_if_idle(self) -> None:
        """Close the connection, unless a request is in progress, or the first one is still to come."""
        if self.idle and not self.is_new and not self._writes_wait:
            self._close()

    def _close(self) -> None:
        # Once, because a TLS transport of asyncio that is closed twice can no longer be measured or aborted.
        if not self._transport.is_closing():
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()
