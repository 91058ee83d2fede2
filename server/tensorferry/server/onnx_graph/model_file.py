"""ONNX files, read without their weights."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
from onnx import external_data_helper, numpy_helper

from tensorferry.server.onnx_graph.values import Content, Value, of_content
from tensorferry.server.wire.fields import DELIMITED, encode_varint, fields

# Numbers that a constant may have to be kept: axes, shapes, pads and the like have few.
_SMALL = 256
# Fields of a tensor with more bytes are left out; 256 numbers have fewer.
_LARGE = 4096

# The messages in a message, by their fields' numbers.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
    "tensor": {},
}
# An attribute's lists of numbers and strings.
_LISTS = (7, 8, 9)


class UnreadableModel(ValueError):
    """A file that is no ONNX model."""


def read_model(path: Path) -> onnx.ModelProto:
    """The model in a file, with large weights left empty; UnreadableModel when there is none.

    The last one is kept, because a model's load needs it more than once. Callers must not change it.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise UnreadableModel(f"cannot be read: {error.strerror}") from error
    return _read(path, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)
def _read(path: Path, _inode: int, _modified: int, size: int) -> onnx.ModelProto:
    if not size:
        raise UnreadableModel("is empty")
    if path.suffix == ".ort":
        raise UnreadableModel("is in the format of ONNX Runtime, of which the graph cannot be read")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            model = onnx.ModelProto.FromString(_without_weights(data, 0, len(data), "model"))
    except Exception as error:  # protobuf's own errors differ between its versions
        raise UnreadableModel("is no ONNX model") from error
    if not model.graph.node and not model.graph.output:
        raise UnreadableModel("has no graph")
    for tensor in _tensors(model):
        if external_data_helper.uses_external_data(tensor):
            _read_if_small(tensor, path.parent)
    return model


def _without_weights(data: mmap.mmap, start: int, end: int, message: str) -> bytes:
    """The serialised message, without the numbers of large tensors in it."""
    parts = []
    began = start
    for number, kind, at, stop in fields(data, start, end):
        if message == "attribute" and number in _LISTS:
            # Of trees these have millions of entries, and no tensor is beside them.
            parts.append(data[began:end])
            break
        large = kind == DELIMITED and stop - at > _LARGE
        inside = _INSIDE[message].get(number) if large else None
        if inside is not None:
            content = _without_weights(data, at, stop, inside)
            parts += [encode_varint(number << 3 | DELIMITED), encode_varint(len(content)), content]
        elif not (large and message == "tensor"):
            parts.append(data[began:stop])
        began = stop
    return b"".join(parts)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from _tensors_of(model.graph)
    for function in model.functions:
        yield from _tensors_of_nodes(function.node)


def _tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _tensors_of_nodes(graph.node)


def _tensors_of_nodes(nodes: object) -> Iterator[onnx.TensorProto]:
    for node in nodes:  # type: ignore[attr-defined]
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _tensors_of(attribute.g)


def _read_if_small(tensor: onnx.TensorProto, folder: Path) -> None:
    """Read the numbers of a small tensor that lie in another file."""
    if int(np.prod(tensor.dims, dtype=np.int64)) > _SMALL:
        return
    try:
        external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    except Exception:  # they are then unknown, and a node that needs them says so
        return
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.DEFAULT


def constant(tensor: onnx.TensorProto) -> Value:
    """A tensor of the file, with its numbers where they are few."""
    shape = tuple(tensor.dims)
    return _content(tensor, shape) or Value(shape)


def _content(tensor: onnx.TensorProto, shape: tuple[int, ...]) -> Value | None:
    if int(np.prod(shape, dtype=np.int64)) > _SMALL or tensor.data_type == onnx.TensorProto.STRING:
        return None
    if external_data_helper.uses_external_data(tensor):
        return None
    try:
        array = numpy_helper.to_array(tensor)
    except Exception:  # of a datatype that this version of onnx does not have, or data in another file
        return None
    if array.dtype.kind not in "biuf" or array.shape != shape:
        return None
    content: Content = array.astype(object)
    return of_content(content)
