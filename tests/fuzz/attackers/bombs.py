"""Messages that are small on the wire and large when parsed, for every method with lists or texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tensorferry.server.wire.fields import encode_varint


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
