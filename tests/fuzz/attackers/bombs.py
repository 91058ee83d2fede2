"""Messages that are small on the wire and large when parsed, for every method with lists or texts.

As a program it sends them to a real server, and prints the effect on another client and on the
server's memory: `PYTHONPATH=tests python -m fuzz.attackers.bombs --transport lane`.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from fuzz.attackers.raw import Connection, framed, headers_of
from fuzz.attackers.wire import Wire
from support.server.tokens import EVERY, STREAMS, bearer, line

from tensorferry.server.wire.fields import encode_varint

TOKEN = "bombs-secret"
_MESSAGE_BYTES = 60_000_000
_OTHERS_PAUSE_SECONDS = 0.002
_NAMES: Mapping[int | None, str] = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Bomb:
    """A message of about the requested size, and its method."""

    name: str
    method: str
    data: bytes


def field(number: int, content: bytes) -> bytes:
    """Return a serialised field with bytes in it."""
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content


def _many(entry: bytes, size: int) -> bytes:
    return entry * (size // len(entry))


def _inference(size: int) -> Mapping[str, bytes]:
    """Return ModelInferRequests."""
    empty = _many(b"\0", 0)
    tensor = 5
    return {
        "inputs": _many(field(5, empty), size),
        "outputs": _many(field(6, empty), size),
        "parameters": _many(field(4, empty), size),
        "raw_input_contents": _many(field(7, empty), size),
        "parameters of an input": field(tensor, _many(field(4, empty), size)),
        "parameters of an output": field(6, _many(field(2, empty), size)),
        "shape": field(tensor, _many(b"\x18\x01", size)),
        "packed shape": field(tensor, field(3, _many(b"\x01", size))),
        "contents again and again": field(tensor, _many(field(5, empty), size)),
        "bytes_contents": field(tensor, field(5, _many(field(8, empty), size))),
        "bytes_contents of many inputs": _many(field(tensor, field(5, _many(field(8, empty), 2000))), size),
        "int64_contents": field(tensor, field(5, _many(b"\x18\x01", size))),
        "packed int64_contents": field(tensor, field(5, field(3, _many(b"\x01", size)))),
        "lists of no int64_contents": field(tensor, field(5, _many(field(3, empty), size))),
        "lists of no fp32_contents": field(tensor, field(5, _many(field(6, empty), size))),
        "unknown fields in contents": field(tensor, field(5, _many(field(15, empty), size))),
        "unknown fields": _many(b"\x68\x01", size),
        "the model's name again and again": _many(field(1, empty), size),
        "a long name": field(1, _many(b"n", size)),
        "a long id": field(3, _many(b"i", size)),
        "a long name of an input": field(tensor, field(1, _many(b"n", size))),
        "a long parameter": field(4, field(1, b"p") + field(2, field(3, _many(b"p", size)))),
        "groups": _many(b"\x7b\x7c", size),
    }


def _others(size: int) -> Mapping[str, Mapping[str, bytes]]:
    """Return messages of other methods, by method."""
    long = _many(b"n", size)
    lists = {"entries": _many(field(3, b""), size), "a long name": field(1, long)}
    settings = {"entries": _many(field(1, b""), size), "a long name": field(1, field(1, long))}
    name = {"a long name": field(1, long), "unknown fields": _many(b"\x68\x01", size)}
    return {
        "ServerLive": {"unknown fields": _many(b"\x68\x01", size)},
        "ModelReady": name,
        "ModelMetadata": name,
        "ModelConfig": name,
        "ModelStatistics": name,
        "RepositoryIndex": name,
        "RepositoryModelLoad": lists,
        "RepositoryModelUnload": lists,
        "SystemSharedMemoryRegister": {"a long key": field(2, long)},
        "SystemSharedMemoryStatus": name,
        "CudaSharedMemoryRegister": {"a long handle": field(2, long)},
        "TraceSetting": {
            **settings,
            "values": field(1, field(1, b"trace_rate") + field(2, _many(field(1, b""), size))),
        },
        "LogSettings": settings,
        "Check": name,
        "Watch": name,
        "List": {"unknown fields": _many(b"\x68\x01", size)},
        "ServerReflectionInfo": {"a long symbol": field(4, long)},
    }


def bombs(size: int) -> Iterator[Bomb]:
    """Return each bomb, of about `size` bytes, for each method that takes it."""
    for name, data in _inference(size).items():
        for method in ("ModelInfer", "ModelStreamInfer"):
            yield Bomb(name, method, data)
    for method, messages in _others(size).items():
        for name, data in messages.items():
            yield Bomb(name, method, data)


class Other(threading.Thread):
    """A good client that calls continuously, and the duration of each call in seconds."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(daemon=True)
        self._wire = wire
        self._over = threading.Event()
        self.took: list[float] = []
        self.most_memory_kb = 0

    def run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self._wire.check_good()
            self.took.append(time.monotonic() - began)
            self.most_memory_kb = max(self.most_memory_kb, self._wire.figures()["memory_kb"])
            self._over.wait(_OTHERS_PAUSE_SECONDS)

    def over(self) -> tuple[float, float]:
        """Return the 99th percentile and the maximum of its calls, in seconds."""
        self._over.set()
        self.join()
        took = sorted(self.took)
        return took[len(took) * 99 // 100], took[-1]


def _send(
    address: str, bomb: Bomb, data: bytes, packed: bool, token: str | None, given: argparse.Namespace
) -> Counter[str]:
    """Return the outcomes of ten calls, one after the other, each by its own client; repeated for
    `seconds`.
    """
    send = _send_packed if packed else _send_plain
    outcomes: Counter[str] = Counter()
    began = time.monotonic()
    while outcomes.total() < 10 or time.monotonic() - began < given.seconds:
        outcomes[send(address, bomb.method, data, token)] += 1
        time.sleep(given.pause)
    return outcomes


def _send_packed(address: str, method: str, data: bytes, token: str | None) -> str:
    with Connection(address, 120) as connection:
        headers = headers_of(path=EVERY[method], grpc_encoding="gzip")
        if token:
            headers.append((b"authorization", f"Bearer {token}".encode()))
        call = connection.begin(headers)
        connection.send_all(call, framed(data, flag=1))
        connection.await_answers([call])
        answer = connection.answers[call]
        refused = b"INVALID_ARGUMENT" in answer.data
        return "INVALID_ARGUMENT in the stream" if refused else _NAMES.get(answer.grpc_status, "reset")


def _send_plain(address: str, method: str, data: bytes, token: str | None) -> str:
    metadata = bearer(token) if token else ()
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        try:
            if method.endswith(STREAMS):
                stream: Any = channel.stream_stream(EVERY[method])
                answer = next(stream(iter([data]), timeout=120, metadata=metadata), b"")
                return "INVALID_ARGUMENT in the stream" if b"INVALID_ARGUMENT" in answer else "OK"
            unary: Any = channel.unary_unary(EVERY[method])
            unary(data, timeout=120, metadata=metadata)
        except grpc.RpcError as error:
            status: Any = error
            return str(status.code().name)
        return "OK"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=("lane", "threaded"), required=True)
    parser.add_argument("--only", default="", help="a part of the names of methods and bombs")
    parser.add_argument(
        "--bytes", type=int, default=_MESSAGE_BYTES, help="of each message, when it is unpacked"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="how long each is sent, ten times at least"
    )
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two of them")
    parser.add_argument("--plain", action="store_true", help="as they are too, not only packed by gzip")
    parser.add_argument("--without-token", action="store_true", help="by clients that may not call")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokens"
        path.write_text(line("bombs", "infer,control", TOKEN))
        wire = Wire(Path(scratch), given.transport, "--auth-tokens", path, token=TOKEN)
        try:
            _measure(wire, given)
        finally:
            wire.server.stop()


def _measure(wire: Wire, given: argparse.Namespace) -> None:
    other = Other(wire)
    cpu = wire.cpu_seconds()
    other.start()
    time.sleep(3)
    alone, longest = other.over()
    of_a_good_call = (wire.cpu_seconds() - cpu) / len(other.took)
    before = wire.figures()["memory_kb"]
    print(
        f"without bombs: p99 {alone * 1e3:.1f} ms, slowest {longest * 1e3:.1f} ms, {of_a_good_call * 1e3:.2f} ms of CPU a "
        f"call, memory {before >> 10} MB"
    )
    token = None if given.without_token else TOKEN
    for bomb in bombs(given.bytes):
        if given.only not in f"{bomb.method} {bomb.name}":
            continue
        for packed in (True, False) if given.plain else (True,):
            data = bomb.data
            if packed:
                data = gzip.compress(data, 6)
            other = Other(wire)
            cpu = wire.cpu_seconds()
            other.start()
            outcomes = _send(wire.server.address, bomb, data, packed, token, given)
            p99, longest = other.over()
            cpu = wire.cpu_seconds() - cpu - of_a_good_call * len(other.took)
            print(
                f"{bomb.method:24s} {bomb.name:34s} {'gzip' if packed else 'plain':5s} {len(data) / 1e3:8.0f} KB  "
                f"p99 {p99 * 1e3:6.1f} ms, slowest {longest * 1e3:6.1f} ms, memory +{(other.most_memory_kb - before) / 1024:5.0f} MB, "
                f"{cpu / outcomes.total() * 1e3:5.1f} ms of CPU a bomb; {len(other.took)} good calls, {dict(outcomes)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
