"""The strings in an ONNX file: the words that a model of texts or categories knows, and may treat in its own way.

The file is walked through as protobuf has it on the wire, message by message, so that nothing of the weights is read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorferry.server.onnx_graph import value_dependent_nodes
from tensorferry.server.wire.fields import DELIMITED, MalformedError, fields

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


def string_lists(path: Path) -> Sequence[Sequence[str]]:
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
        except (MalformedError, RecursionError):
            # Cut off, nested too deep, or no protobuf: what came before are words all the same.
            pass
    return found


def _lists(data: mmap.mmap, start: int, end: int, message: str) -> Iterator[Sequence[str]]:
    words: list[str] = []
    for number, kind, at, stop in fields(data, start, end):
        inside = _FIELDS[message].get(number) if kind == DELIMITED else None
        if inside == "word":
            if stop - at <= _LONGEST_WORD and len(words) < _MOST_WORDS:
                words.append(data[at:stop].decode(errors="replace"))
        elif inside is not None:
            yield from _lists(data, at, stop, inside)
    if words:
        yield tuple(words)


def has_steady_run_time(path: Path) -> bool:
    """True when the graph lets the time of a run depend on shapes alone. False where that cannot be shown."""
    return path.suffix == ".onnx" and not value_dependent_nodes(path)
