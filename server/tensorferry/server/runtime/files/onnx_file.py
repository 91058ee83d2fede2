"""Strings in a model's ONNX file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import onnx

from tensorferry.server.onnx.graph.model_file import UnreadableModel, all_nodes, read_model, tensors_in

_MAX_LISTS = 16
_MAX_STRINGS = 64
_MAX_STRING_BYTES = 256


def string_lists(path: Path) -> Sequence[Sequence[str]]:
    """Return the strings in the file's attributes and tensors, as at most 16 lists of at most 64 strings.

    These are words or categories that the model may treat specially. Strings of more than 256 bytes are left out. Returns
    nothing for a file that cannot be read.
    """
    try:
        lists = _lists(read_model(path))
    except UnreadableModel:
        return ()
    found: list[Sequence[str]] = []
    for texts in lists:
        short = (each for each in texts if len(each) <= _MAX_STRING_BYTES)
        words = tuple(each.decode(errors="replace") for each in islice(short, _MAX_STRINGS))
        if words and words not in found:
            found.append(words)
        if len(found) == _MAX_LISTS:
            break
    return found


def _lists(model: onnx.ModelProto) -> Iterator[Iterable[bytes]]:
    for node in all_nodes(chain(model.graph.node, *(function.node for function in model.functions))):
        for attribute in node.attribute:
            yield attribute.strings
            if attribute.HasField("s"):
                yield [attribute.s]
    for tensor in tensors_in(model):
        yield tensor.string_data
