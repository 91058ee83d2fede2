"""Calls with faults in HTTP/2, in gRPC's framing or in their message, sent to a real server process.

`python -m fuzz.attackers.wire --transport lane --runs N --figures FILE` writes figures like
guided.py.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import re
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.exceptions
import numpy as np
from fuzz import mutate
from fuzz.attackers.raw import PREFIX, Connection, Header, framed, headers_of, say_no_more
from fuzz.target import BOUND_SECONDS, FindingError, Shape, Target
from fuzz.world import WORDS
from support.models import small
from support.processes.server import ServerProcess
from support.server.rig import fp32, request

from tensorferry.protos import inference_pb2 as pb

_CALLS_A_CONNECTION = 100
# One connection in this many gets frames that are not valid HTTP/2.
_BROKEN_EVERY = 4
_BROKEN_AT_ONCE = 20
# Allowed growth of the server: threads, files and connections that are closing.
_MORE_MEMORY_KB, _MORE_FILES, _MORE_THREADS = 48 * 1024, 40, 520
# Messages of gRPC core with INTERNAL, as its specification requires, before a call reaches the
# server's code. Any other INTERNAL is a finding.
_OF_CORE = re.compile(
    r"Error parsing '|Compression bit set|Illegal header|Metadata keys cannot|Duplicate '|Bad compressed|"
    r"Unexpected error decompressing|Decompression |Invalid gRPC frame"
)

_METHODS = (
    "ModelInfer", "ModelInfer", "ModelInfer", "ModelInfer", "ModelStreamInfer", "ModelStreamInfer", "ServerLive",
    "ModelMetadata", "ModelStatistics", "TraceSetting", "SystemSharedMemoryRegister", "RepositoryIndex", "Nothing", "",
)  # fmt: skip
_CHANGES: Sequence[tuple[str, Sequence[str | None]]] = (
    ("content_type", (None, "", "text/html", "application/grpc+json", "application/grpc+proto", "application/json")),
    ("te", (None, "", "gzip")),
    ("method", ("GET", "PUT", "", "post", None)),
    ("scheme", ("https", "ftp", "", None)),
    ("authority", (None, "", "a" * 300, "@:/")),
    ("path", (None, "", "/", "*", "//", PREFIX, "/other.Service/ModelInfer", "/" + "a" * 3000, PREFIX + "Model%Infer")),
    ("grpc_timeout", ("0n", "1n", "1u", "5S", "99999999H", "-1S", "1", "S", "", "1e3S", "999999999S", "1X", "٣S")),
    ("grpc_encoding", ("gzip", "deflate", "identity", "br", "", "gzip,deflate")),
    ("grpc_accept_encoding", ("gzip", "", "zzz", "identity,deflate,gzip")),
    ("traceparent", ("", "00-" + "0" * 32 + "-" + "0" * 16 + "-00", "zz", "00-" + "f" * 5000)),
    ("tensorferry_stream_order", ("completion", "request", "", "x")),
    ("x_data_bin", ("AAAA", "!!!", "A", "", "/+==")),
    ("authorization", ("Bearer x", "", "Basic AAAA")),
    ("x_long", ("v" * 4000, "v" * 7000)),
    ("user_agent", ("", "a" * 500)),
    ("connection", ("close", "keep-alive")),
    ("transfer_encoding", ("chunked",)),
    ("content_length", ("5", "-1", "x", "99999999999")),
    ("grpc_status", ("0", "13")),
    ("grpc_previous_rpc_attempts", ("1", "x", "99999999999999")),
)  # fmt: skip


# Status of a call when the queue is full, and when more calls wait than core keeps.
_FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


class _Messages(Target):
    """ModelInfer messages for mutation."""

    words: Sequence[str] = (*WORDS, "m")

    def shape(self, data: bytes) -> Shape:
        return Shape(b"", pb.ModelInferRequest)

    def seeds(self) -> Sequence[bytes]:
        made = [_good(number) for number in range(3)]
        made.append(request({"x": fp32(2, 3)}, typed=True, model="m"))
        return [message.SerializeToString() for message in made]


def _good(number: int) -> pb.ModelInferRequest:
    return request({"x": np.full((1, 3), number, np.float32)}, model="m", id=str(number))


class Wire:
    """A server, a good client of it, and the server's figures at the start."""

    def __init__(self, directory: Path, transport: str, *options: str | Path) -> None:
        self.server = ServerProcess.start(
            small.echo(directory / "m.onnx", dims=("batch", 3)), *options, transport=transport
        )
        self._channel = grpc.insecure_channel(self.server.address)
        self._infer: Callable[..., bytes] = self._channel.unary_unary(PREFIX + "ModelInfer")
        self._number = 0
        for _ in range(50):
            self.check_good()
        self._before = self.figures()

    def check_good(self) -> None:
        """Check that a good request gets its own answer."""
        self._number += 1
        good = _good(self._number)
        answer = pb.ModelInferResponse.FromString(
            self._infer(good.SerializeToString(), timeout=BOUND_SECONDS)
        )
        if (answer.id, list(answer.raw_output_contents)) != (good.id, list(good.raw_input_contents)):
            raise FindingError(f"request {good.id} was answered with {answer}")

    def answers_good(self) -> bool:
        """Like `check_good`; return False while the server is full, until it has run what attackers
        sent.
        """
        try:
            self.check_good()
        except grpc.RpcError as error:
            status: Any = error
            if status.code() not in _FULL:
                raise
            return False
        return True

    def figures(self) -> dict[str, int]:
        """Return the memory in KB, open files and threads of all processes of the server."""
        figures: Counter[str] = Counter()
        for pid in self.server.processes():
            process = Path(f"/proc/{pid}")
            fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            figures["memory_kb"] += int(fields["VmRSS"].split()[0])
            figures["files"] += len(os.listdir(process / "fd"))
            figures["threads"] += int(fields["Threads"])
        return figures

    def close(self, more_memory_kb: int = _MORE_MEMORY_KB) -> dict[str, int]:
        """Stop the server; raise FindingError for growth or error log lines; return the growth of
        memory.
        """
        most = {"memory_kb": more_memory_kb, "files": _MORE_FILES, "threads": _MORE_THREADS}
        give_up = time.monotonic() + BOUND_SECONDS
        while True:
            figures = self.figures()
            grown = {name: figures[name] - self._before[name] for name in figures}
            more = any(grown[name] > most[name] for name in most)
            # Connections that just ended are removed late on a busy machine.
            if not more or time.monotonic() > give_up:
                break
            self.check_good()
        self._channel.close()
        code = self.server.stop()
        if code or self.server.errors():
            raise FindingError(f"exit {code}, log: {self.server.errors()[:3]}")
        if more:
            raise FindingError(f"the server has more than before: {grown}")
        return grown


def body(random: Random, message: bytes) -> bytes:
    """Return the message in gRPC's framing, or in a faulty one."""
    match random.randrange(12):
        case 0:
            return framed(message, length=len(message) + random.choice((1, 5, 1000)))
        case 1:
            return framed(message, length=max(0, len(message) - random.choice((1, 5, 20))))
        case 2:
            return framed(message, length=random.choice((1 << 31, (1 << 32) - 1, 1 << 26, 1 << 30)))
        case 3:
            return framed(random.choice((message, gzip.compress(message), zlib.compress(message))), flag=1)
        case 4:
            return framed(message, flag=random.choice((2, 128, 255)))
        case 5:
            return framed(message) + framed(message) + framed(b"")
        case 6:
            return framed(message)[: random.randrange(1, 6)]
        case 7:
            return b""
        case 8:
            return mutate.with_bytes_changed(random, framed(message))
        case _:
            return framed(message)


def call_headers(random: Random) -> list[Header]:
    """Return a call's headers, mostly with at most one fault."""
    changed: dict[str, str | None] = {}
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        name, values = random.choice(_CHANGES)
        changed[name] = random.choice(values)
    headers = headers_of(random.choice(_METHODS), **changed)
    match random.randrange(30):
        case 0:
            headers.append(random.choice(headers))
        case 1:
            random.shuffle(headers)
        case 2:
            headers += [(b"x-%d" % number, b"v") for number in range(50)]
        case 3:
            headers.append((random.choice((b"UPPER", b"", b"a b", b"\xff", b"a\0")), b"v"))
        case 4:
            headers.append((b"x-text", random.choice((b"\xff\xfe", b"\0", b"a\r\nb", b"\xc3\xa9"))))
        case 5:
            at = random.randrange(len(headers))
            headers[at] = (headers[at][0], random.randbytes(random.choice((1, 8, 64))))
    return headers


def call_batch(
    random: Random, wire: Wire, outcomes: Counter[str], seeds: Sequence[bytes], count: int
) -> None:
    """Make calls on one connection, all at once; each must end, unless the connection does."""
    target = _Messages()
    with Connection(wire.server.address, BOUND_SECONDS) as connection:
        waited = []
        for _ in range(count):
            if connection.closed:
                break
            data = body(
                random,
                mutate.mutant(random, target, seeds) if random.random() < 0.7 else random.choice(seeds),
            )
            call = connection.begin(call_headers(random), last=not data)
            if data:
                connection.send(call, data, last=random.random() < 0.9)
            if random.random() < 0.1 or not _half_closed(connection, call):
                connection.reset(call)
                connection.answers[call].ended = True
            waited.append(call)
        connection.flush()
        try:
            connection.await_answers(waited)
        except h2.exceptions.ProtocolError as error:
            raise FindingError(f"the server breaks HTTP/2's rules: {error}") from error
        for call in waited:
            outcomes[_outcome(connection, call)] += 1
        outcomes["not sent"] += count - len(waited)


def _half_closed(connection: Connection, call: int) -> bool:
    stream: Any = connection.h2.streams.get(call)
    return stream is None or stream.state_machine.state.name != "OPEN"


def _outcome(connection: Connection, call: int) -> str:
    answer = connection.answers[call]
    if answer.grpc_status == grpc.StatusCode.INTERNAL.value[0]:
        if not _OF_CORE.match(answer.message):
            raise FindingError(f"answered with INTERNAL: {answer.message}")
        return "INTERNAL of gRPC core"
    if answer.grpc_status is not None:
        return next(code.name for code in grpc.StatusCode if code.value[0] == answer.grpc_status)
    if answer.status not in (None, 200):
        return f"HTTP {answer.status}"
    if answer.reset is not None:
        return "reset by the server"
    return "connection closed" if not answer.ended else "left by the client"


def broken_frames(random: Random, wire: Wire, outcomes: Counter[str], seeds: Sequence[bytes]) -> None:
    """Send a connection with bytes changed anywhere; the server may do anything but hang or crash."""
    target = Connection.__new__(Connection)
    config = h2.config.H2Configuration(
        client_side=True, header_encoding=None, validate_outbound_headers=False
    )
    target.h2 = h2.connection.H2Connection(config)
    target.answers = {}
    target.h2.initiate_connection()
    preface = target.h2.data_to_send()
    for _ in range(3):
        call = target.begin(headers_of())
        target.send(call, framed(random.choice(seeds)), last=True)
    frames = target.h2.data_to_send()
    data = preface + mutate.with_bytes_changed(random, frames, frames)
    if random.random() < 0.2:
        data = mutate.with_bytes_changed(random, preface + frames, frames)
    with Connection.raw(wire.server.address, BOUND_SECONDS) as socket:
        try:
            socket.sendall(data)
            say_no_more(socket)
            while socket.recv(1 << 16):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass
    outcomes["broken frames"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=("lane", "threaded"), required=True)
    parser.add_argument("--runs", type=int, default=1 << 62)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--figures", type=Path, required=True)
    given = parser.parse_args()
    logging.getLogger("hpack").setLevel(logging.WARNING)
    random, outcomes, finding = Random(given.seed), Counter[str](), ""
    seeds = _Messages().seeds()
    began, grown = time.monotonic(), {"memory_kb": 0}
    tried = 0
    with tempfile.TemporaryDirectory() as scratch:
        wire = Wire(Path(scratch), given.transport)
        try:
            while tried < given.runs and time.monotonic() - began < given.seconds:
                if random.randrange(_BROKEN_EVERY) == 0:
                    count = min(_BROKEN_AT_ONCE, given.runs - tried)
                    for _ in range(count):
                        broken_frames(random, wire, outcomes, seeds)
                    tried += count
                else:
                    count = min(_CALLS_A_CONNECTION, given.runs - tried)
                    call_batch(random, wire, outcomes, seeds, count)
                    tried += count
                wire.check_good()
            outcomes.pop("not sent", None)
            grown = wire.close()
        except (FindingError, TimeoutError, grpc.RpcError) as error:
            finding = f"{type(error).__name__}: {error}"
            wire.server.stop()
    figures = {
        "tried": sum(outcomes.values()), "outcomes": dict(outcomes), "seconds": time.monotonic() - began,
        "memory_mb": grown["memory_kb"] // 1024, "finding": finding,
    }  # fmt: skip
    given.figures.write_text(json.dumps(figures))
    raise SystemExit(1 if finding else 0)


if __name__ == "__main__":
    main()
