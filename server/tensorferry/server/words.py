"""The strings in an ONNX file: the words that a model of texts or categories knows, and may treat in its own way.

The file is walked through as protobuf has it on the wire, message by message, so that nothing of the weights is read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

# What of a message is looked into, by its field's number; "word" is a string.
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {4: "word", 5: "tensor", 6: "graph", 9: "word", 10: "tensor", 11: "graph"},
    "tensor": {6: "word"},
}
# Of longer lists the first words do.
_MOST_LISTS = 16
_MOST_WORDS = 64
_LONGEST_WORD = 256

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


def words_of(path: Path) -> Sequence[Sequence[str]]:
    """The strings of the file, in lists as its attributes and tensors have them; none where it is in no such form.

    At most 16 lists of 64 words.
    """
    if path.suffix != ".onnx" or not path.stat().st_size:
        return ()
    found: list[Sequence[str]] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for words in _lists(data, 0, len(data), "model"):
                if words not in found:
                    found.append(words)
                if len(found) == _MOST_LISTS:
                    break
        except (IndexError, ValueError, RecursionError):
            # Cut off, nested too deep, or no protobuf: what came before are words all the same.
            pass
    return found


def _lists(data: mmap.mmap, start: int, end: int, message: str) -> Iterator[Sequence[str]]:
    words: list[str] = []
    for field, at, stop in _delimited(data, start, end):
        inside = _FIELDS[message].get(field)
        if inside == "word":
            if stop - at <= _LONGEST_WORD and len(words) < _MOST_WORDS:
                words.append(data[at:stop].decode(errors="replace"))
        elif inside is not None:
            yield from _lists(data, at, stop, inside)
    if words:
        yield tuple(words)


def _delimited(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The strings and messages of a message: field, and where its content begins and ends."""
    while at < end:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _DELIMITED:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError
            yield tag >> 3, at, at + size
            at += size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError
