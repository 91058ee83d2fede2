"""Pipelined HTTP requests of which one is hostile: framed as httptools frames them, and each answered once, in order."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import deepcopy
from functools import partial
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import httptools
import numpy as np
from fuzz.target import BOUND_SECONDS, FindingError, Shape, Target, timed
from fuzz.world import WORDS, World

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.methods.core import CoreMethods
from tensorferry.server.methods.statistics import StatisticsMethods
from tensorferry.server.system.threads import HandlerThreads
from tensorferry.server.transport.http.application import InferenceApplication
from tensorferry.server.transport.http.connection import Connection, Exchange
from tensorferry.server.transport.http.server import HttpServer
from tensorferry.server.transport.transport_state import TransportState

_MAX_BODY = 1 << 20
_HEAD = b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: localhost\r\n"
# How the bytes after the first become a request: as they are, or as a body with a good head.
_RAW, _PLAIN, _CHUNKED, _GZIP, _DEFLATE, _BINARY = range(6)
# To which model, by the quotient of the first byte and their number.
_MODELS = (b"numbers", b"strings", b"tokens", b"alone")
# Values that take the place of others in JSON.
_VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2, 3, 255, 1 << 31, 1 << 63, (1 << 64) - 1, 10**30, 0.5, 1e308, float("nan"), float("inf"),
    "", "x", "\ud800", "\0", "a\r\nb: c", "é" * 200, [], {}, [[]], [0] * 70, {"data": 1}, [1, [2, [3]]], "9" * 5000,
)  # fmt: skip


# Good requests, whose answers differ. Not inferences, because each would wait for a thread.
_BEFORE, _AFTER = (b"GET /v2/models/%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % name for name in _MODELS[:2])


class _AtOnce(HandlerThreads):
    """Runs work on the calling thread, so that an input has the same effect each time."""

    def __init__(self) -> None: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


class _Server(HttpServer):
    """A server whose loop the target runs, and which notes what it reads."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.read: list[tuple[Exchange, bytes]] = []
        # One entry for each call that the loop has not made; other threads add to it.
        self.due: deque[None] = deque()
        self.error: Any = None
        self._loop.set_exception_handler(self._note)
        application: Any = self.application
        for calls in (application, application._methods):
            calls.close()
            calls._threads = _AtOnce()
        self._serve_by_application, application.serve = application.serve, self._serve

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.error = context

    def run_until_change(self) -> None:
        """Run the loop until an answer is written, or what another thread has called is done."""
        give_up = self._loop.call_later(BOUND_SECONDS, self._loop.stop)
        self._loop.run_forever()
        give_up.cancel()
        if self.error:
            raise FindingError(f"a callback failed: {self.error}")

    def close(self, deadline: float) -> None:
        super().close(deadline)
        self._loop.close()

    def stop(self) -> None:
        self._loop.stop()

    def on_loop(self, call: Callable[[], None]) -> None:
        def counted() -> None:
            self.due.pop()
            call()
            self._loop.stop()

        self.due.append(None)
        super().on_loop(counted)

    def _serve(self, exchange: Exchange, body: bytes) -> None:
        self.read.append((exchange, body))
        self._serve_by_application(exchange, body)


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self, wrote: Callable[[], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self._wrote = wrote
        self.answers: list[bytes] = []
        self.closing = False

    def write(self, data: Any) -> None:
        if self.closing:
            raise FindingError("an answer after the end")
        if not data.startswith(b"HTTP/1.1 100"):
            self.answers.append(bytes(data))
            self._wrote()

    def close(self) -> None:
        self.closing = True

    write_eof = abort = close

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Messages:
    """The messages that httptools reads, as far as it has no objection."""

    def __init__(self, data: bytes, kind: Any = httptools.HttpRequestParser) -> None:
        # Methods, fields, bodies and addresses.
        self.complete: list[tuple[str, tuple[Any, ...], bytes, bytes]] = []
        self.head: list[tuple[str, str]] = []
        self.url = self.body = self.method = b""
        self.fields: list[tuple[str, str]] = []
        self.refused = False
        self.parser = kind(self)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # To another protocol, which the server does not speak.
            self.refused = True

    def on_message_begin(self) -> None:
        self.url, self.body, self.fields = b"", b"", []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t")))

    def on_headers_complete(self) -> None:
        if isinstance(self.parser, httptools.HttpRequestParser):
            self.method = self.parser.get_method()
        # Trailers follow, which are no fields of the request.
        self.head, self.fields = self.fields, []

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if isinstance(self.parser, httptools.HttpRequestParser) and self.parser.should_upgrade():
            return
        self.complete.append((self.method.decode(), tuple(self.head), self.body, self.url.partition(b"?")[0]))


class HttpTarget(Target):
    """An input is a byte for its form, and a request. Good ones are pipelined before and after it, in pieces of any size."""

    name = "http"
    words: Sequence[str] = WORDS

    def __init__(self, directory: Path) -> None:
        self._world = World(directory)
        self._world.register()
        service = InferenceService(self._world.registry, regions=self._world.regions)
        config = ServerConfig(models=(), max_message_bytes=_MAX_BODY)
        self._shared = TransportState(config)
        listening = socket.create_server(("127.0.0.1", 0))
        methods: list[Any] = [
            CoreMethods(service, self._world.registry, version="1"),
            StatisticsMethods(self._world.registry),
        ]
        self._server = _Server(
            listening,
            partial(InferenceApplication, service, methods, self._shared, listening),
            unread=self._shared.unread,
            grpc_address=lambda: "here",
        )
        # The answers to the good requests, by what is read of them.
        self._good: dict[Any, bytes] = {}
        for request in (_BEFORE, _AFTER):
            _, (answer,) = self._answers([request])
            ((exchange, body),) = self._server.read
            self._good[_read(exchange, body)] = answer
        assert len(set(self._good.values())) == 2

    def seeds(self) -> Sequence[bytes]:
        return _seeds()

    def shape(self, data: bytes) -> Shape:
        return Shape(b"", None)

    def changed(self, random: Random, data: bytes) -> bytes | None:
        """Change the JSON of an input."""
        binary = data[:1] != b"" and data[0] % 6 == _BINARY
        start, size = (3, int.from_bytes(data[1:3], "big")) if binary else (1, len(data))
        try:
            value = json.loads(data[start:][:size])
        except (ValueError, RecursionError):
            return None
        for _ in range(random.choice((1, 1, 2, 3))):
            value = _changed(random, value)
        text = json.dumps(value).encode()
        return data[:1] + (
            len(text).to_bytes(2, "big")[-2:] + text + data[start + size :] if binary else text
        )

    def run(self, data: bytes) -> str:
        random = Random(zlib.crc32(data))
        sent = _BEFORE + _request(data, random) + _AFTER
        whole, _ = self._answers([sent])
        cuts = sorted(random.randrange(len(sent)) for _ in range(random.choice((1, 3, 20))))
        pieces, _ = self._answers([sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)])
        # Whether a deadline is met is chance.
        if pieces != whole and "504" not in whole + pieces:
            raise FindingError(f"at once: {whole}, in pieces: {pieces}")
        return (*whole[1:], "waits")[0]

    def _answers(self, pieces: Sequence[bytes]) -> tuple[list[str], list[bytes]]:
        """Send pieces on a connection of their own; return the statuses and the bodies of the answers."""
        server = self._server
        transport = _Transport(server.stop)
        server.read.clear()
        connection = Connection(server)
        with timed():
            connection.connection_made(transport)
            for piece in pieces:
                if not transport.closing:
                    connection.data_received(piece)
            while server.due or (len(transport.answers) < len(server.read) and not transport.closing):
                server.run_until_change()
            connection.connection_lost(None)
        answers = transport.answers
        heads = [exchange.head.method == "HEAD" for exchange, _ in server.read]
        for answer, has_no_body in zip_longest(answers, heads[: len(answers)]):
            length = int(answer.partition(b"Content-Length: ")[2].partition(b"\r")[0])
            whole = Messages(answer + bytes(length if has_no_body else 0), httptools.HttpResponseParser)
            if whole.refused or len(whole.complete) != 1:
                raise FindingError(f"httptools cannot read {answer!r}")
        if any(answer[9:12] == b"500" for answer in answers) or server.connections:
            raise FindingError(f"answered with {answers}")
        if len(answers) - len(server.read) not in (0, int(transport.closing)):
            raise FindingError(f"{len(server.read)} requests have {len(answers)} answers")
        self._check_framing(b"".join(pieces), transport.closing)
        statuses = [answer[9:12].decode() for answer in answers[: len(server.read)]]
        # The reason why a connection ends can depend on how much of the request has arrived.
        statuses += ["refused"] * (len(answers) - len(server.read))
        bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers]
        for (exchange, body), answer in zip(server.read, bodies, strict=False):
            if self._good.get(_read(exchange, body), answer) != answer:
                raise FindingError(f"the good request {body!r} was answered with {answer!r}")
        return statuses, bodies

    def _check_framing(self, sent: bytes, closed: bool) -> None:
        theirs = Messages(sent)
        read = self._server.read
        for (exchange, body), other in zip(read, theirs.complete, strict=False):
            ours = _read(exchange, body)
            if ours[:3] != other[:3] or not other[3].endswith(ours[3]):
                raise FindingError(f"read as {ours}, by httptools as {other}")
        if len(read) > len(theirs.complete) and not theirs.refused:
            raise FindingError(f"httptools waits for more of {read[-1][0].head.path}")
        if len(read) < len(theirs.complete) and not closed:
            raise FindingError(f"the server waits for more, but httptools has read {theirs.complete[-1]}")

    def check(self) -> None:
        self._world.check()
        if not self._shared.calls.wait_until_none(0):
            raise FindingError("calls are counted that have ended")

    def close(self) -> None:
        self._server.close(0)
        self._world.close()


def _read(exchange: Exchange, body: bytes) -> tuple[str, tuple[Any, ...], bytes, bytes]:
    """Return the method, the fields, the body and the path of a request as the server has read it."""
    head = exchange.head
    return head.method, tuple(head.fields), body, head.path.encode()


def _request(data: bytes, random: Random) -> bytes:
    """The request that an input stands for."""
    form, body = data[0] if data else _RAW, data[1:]
    head = _HEAD % _MODELS[form // 6 % len(_MODELS)]
    match form % 6:
        case 0:
            return body
        case 2:
            chunks = b""
            while body:
                size = random.choice((1, 2, 7, 100, 10_000))
                chunks += b"%x\r\n%b\r\n" % (len(body[:size]), body[:size])
                body = body[size:]
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        case 3:
            head, body = head + b"Content-Encoding: gzip\r\n", gzip.compress(body, 1)
        case 4:
            head, body = head + b"Content-Encoding: deflate\r\n", zlib.compress(body, 1)
        case 5:
            head, body = (
                head + b"Inference-Header-Content-Length: %d\r\n" % int.from_bytes(body[:2], "big"),
                body[2:],
            )
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _changed(random: Random, value: Any) -> Any:
    """Return JSON with one value, somewhere in it, replaced, repeated or removed."""
    if isinstance(value, (dict, list)) and value and random.random() < 0.85:
        keys: Sequence[Any] = list(value) if isinstance(value, dict) else range(len(value))
        key = random.choice(keys)
        match random.randrange(12):
            case 0:
                del value[key]
            case 1 if isinstance(value, list):
                value.append(deepcopy(value[key]))
            case 1 if isinstance(value, dict):
                value[random.choice(WORDS)] = deepcopy(random.choice(_VALUES))
            case _:
                value[key] = _changed(random, value[key])
        return value
    return (
        random.choice(WORDS)
        if isinstance(value, str) and random.random() < 0.6
        else deepcopy(random.choice(_VALUES))
    )


def _seeds() -> list[bytes]:
    made = [
        bytes([_RAW]) + request
        for request in (
            b"GET /v2/models/numbers/ready HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"HEAD /v2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
            b"GET http://localhost:1/v2/models/stats?x=y HTTP/1.1\r\nHost: localhost\r\nX-Y:\t z \r\nX-Y: \xff\r\n\r\n",
            b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n"
            + b'{"ready":true}',
            _HEAD % b"numbers"
            + b'Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n5;a=b\r\n{"inp\r\n2\r\n"}\r\n0\r\nX: y\r\n\r\n',
            _HEAD % b"numbers" + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            _HEAD % b"numbers"
            + b"Connection: close\r\nContent-Length: 2\r\nX-Request-Timeout: 5\r\nAccept-Encoding: gzip\r\n\r\n{}",
            b"POST /v2/systemsharedmemory/region/other/register HTTP/1.1\r\nHost: localhost\r\nContent-Length: 43\r\n\r\n"
            b'{"key":"key","offset":0,"byte_size":16    }',
            b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\r\n\r\nGET /ping HTTP/1.1\nHost: localhost\n\n",
        )
    ]
    x = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [[1, 2.5, -3], [4, 5, 6]]}
    n = {"name": "n", "datatype": "INT64", "shape": [2, 1], "data": [7, 8]}
    texts = {"name": "s", "datatype": "BYTES", "shape": [1], "data": ["zwölf"]}
    flags = {"name": "b", "datatype": "BOOL", "shape": [1, 2], "data": [True, False]}
    ids = {"name": "ids", "datatype": "INT64", "shape": [1, 3], "data": [[1, 2, 3]]}
    outputs = [
        {"name": "x_out", "parameters": {"binary_data": True}},
        {"name": "n_out", "parameters": {"classification": 1}},
    ]
    shared = {"shared_memory_region": "system", "shared_memory_offset": 0, "shared_memory_byte_size": 24}
    bodies: list[Any] = [
        {"id": "a", "inputs": [x, n], "outputs": outputs, "parameters": {"timeout": 10**7, "priority": 1}},
        {"id": "ü", "inputs": [texts, flags], "parameters": {"binary_data_output": True}},
        {"inputs": [ids]},
        {"inputs": [{**{k: v for k, v in x.items() if k != "data"}, "parameters": shared}, n]},
    ]
    made += [
        bytes([6 * model + form]) + json.dumps(body).encode()
        for form in (_PLAIN, _CHUNKED, _GZIP, _DEFLATE)
        for model, body in zip((0, 1, 2, 0), bodies, strict=True)
    ]
    sized = {"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}}
    head = json.dumps({"id": "b", "inputs": [sized, {**n, "shape": [1, 2]}]}).encode()
    made.append(bytes([_BINARY]) + len(head).to_bytes(2, "big") + head + np.ones(3, np.float32).tobytes())
    made.append(bytes([6 * 2 + _BINARY]) + b"\0\0" + np.arange(3).tobytes())
    return made
