"""Facts about a model from its ONNX file: its strings, and whether run time can depend on values."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorferry.server.onnx.graph import value_dependent_nodes
from tensorferry.server.wire.fields import DELIMITED, MalformedError, fields

# Fields of each message that are scanned, by field number. "string" marks a string.
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {4: "string", 5: "tensor", 6: "graph", 9: "string", 10: "tensor", 11: "graph"},
    "tensor": {6: "string"},
}
_MAX_LISTS = 16
_MAX_STRINGS = 64
_MAX_STRING_BYTES = 256


def string_lists(path: Path) -> Sequence[Sequence[str]]:
    """Return the strings in the file's attributes and tensors, as at most 16 lists of at most 64 strings.

    These are words or categories that the model may treat specially. The wire format is scanned field by field, so
    weights are not read. Returns nothing for other formats.
    """
    if path.suffix != ".onnx" or not path.stat().st_size:
        return ()
    found: list[Sequence[str]] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for strings in _lists(data, 0, len(data), "model"):
                if strings not in found:
                    found.append(strings)
                if len(found) == _MAX_LISTS:
                    break
        except (MalformedError, RecursionError):
            # Truncated, nested too deep, or not protobuf. The strings found so far are still useful.
            pass
    return found


def _lists(data: mmap.mmap, start: int, end: int, message: str) -> Iterator[Sequence[str]]:
    strings: list[str] = []
    for number, kind, at, stop in fields(data, start, end):
        inside = _FIELDS[message].get(number) if kind == DELIMITED else None
        if inside == "string":
            if stop - at <= _MAX_STRING_BYTES and len(strings) < _MAX_STRINGS:
                strings.append(data[at:stop].decode(errors="replace"))
        elif inside is not None:
            yield from _lists(data, at, stop, inside)
    if strings:
        yield tuple(strings)


def has_steady_run_time(path: Path) -> bool:
    """Return whether the graph shows that the time of a run depends only on shapes, not on values."""
    return path.suffix == ".onnx" and not value_dependent_nodes(path)
