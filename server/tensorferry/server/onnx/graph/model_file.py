"""Reading of ONNX files without their weights."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
from onnx import external_data_helper, numpy_helper

from tensorferry.server.onnx.graph.values import Value
from tensorferry.server.wire.fields import DELIMITED, encode_varint, fields

# Constants with more numbers are not kept; axes, shapes and pads have few.
_SMALL = 256
# Tensor fields with more bytes are left out; 256 numbers need fewer.
_LARGE = 4096

# Arithmetic on numbers of other datatypes may wrap around or be rounded, and none of them is an axis or a size.
_KEPT = (
    onnx.TensorProto.BOOL,
    onnx.TensorProto.INT32,
    onnx.TensorProto.INT64,
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
)

# Nested messages by field number.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
    "tensor": {},
}
# Field numbers of an attribute's lists of numbers and strings.
_LISTS = (7, 8, 9)
# A file is read in blocks of this size.
_BLOCK_BYTES = 64 << 10


# Inode, time and size of a file.
FileStatus = tuple[int, int, int]


class UnreadableModel(ValueError):
    """The file is not an ONNX model."""


def read_model(path: Path) -> onnx.ModelProto:
    """Return the model in a file, with large weights left empty; raise UnreadableModel if there is none.

    The last result is cached, because loading a model needs it more than once. Callers must not change it.
    """
    try:
        status = _status(path)
    except OSError as error:
        raise UnreadableModel(f"cannot be read: {error.strerror}") from error
    model, read = _read(path, status)
    if any(status_if_any(path.parent / name) != found for name, found in read.items()):
        # Numbers of another file were replaced, and the file itself was not.
        _read.cache_clear()
        model, _ = _read(path, status)
    return model


def status_if_any(path: Path) -> FileStatus | None:
    """Return what changes with a file; None if it is missing."""
    try:
        return _status(path)
    except (OSError, ValueError):
        # A ValueError if the name has a null character, which a graph may give.
        return None


def _status(path: Path) -> FileStatus:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=1)
def _read(path: Path, status: FileStatus) -> tuple[onnx.ModelProto, Mapping[str, FileStatus | None]]:
    """Return a model, and the files that its external data is in, relative to it, as they were before."""
    model = _parsed(path, status[2])
    outside = [tensor for tensor in tensors_in(model) if external_data_helper.uses_external_data(tensor)]
    names = {entry.value for tensor in outside for entry in tensor.external_data if entry.key == "location"}
    files = {name: status_if_any(path.parent / name) for name in names}
    for tensor in outside:
        _read_if_small(tensor, path.parent)
    return model, files


def external_files(path: Path) -> frozenset[str]:
    """Return the names of the files that tensors of a model are in, relative to it; empty for an unreadable file.

    These files may not be there yet. OSError if the model's is not.
    """
    try:
        return frozenset(_read(path, _status(path))[1])
    except UnreadableModel:
        return frozenset()


def _parsed(path: Path, size: int) -> onnx.ModelProto:
    if not size:
        raise UnreadableModel("is empty")
    if path.suffix == ".ort":
        raise UnreadableModel("is in ONNX Runtime's own format, whose graph cannot be read")
    try:
        with path.open("rb") as file:
            model = onnx.ModelProto.FromString(_without_weights(_FileBytes(file.fileno()), 0, size, "model"))
    except Exception as error:  # protobuf's error types differ between its versions
        raise UnreadableModel("is not an ONNX model") from error
    if not model.graph.node and not model.graph.output:
        raise UnreadableModel("has no graph")
    return model


class _FileBytes:
    """The bytes of an open file. Not a memory map, because a file that is truncated meanwhile would end the process."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._block, self._start = b"", 0

    def __getitem__(self, at: int, /) -> int:
        if not 0 <= at - self._start < len(self._block):
            self._block, self._start = os.pread(self._file, _BLOCK_BYTES, at), at
        return self._block[at - self._start]

    def part(self, start: int, end: int) -> bytes:
        """Return the bytes between two positions."""
        return os.pread(self._file, end - start, start)


def _without_weights(data: _FileBytes, start: int, end: int, message: str) -> bytes:
    """Return the serialised message without the numbers of large tensors."""
    parts = []
    began = start
    for number, kind, at, stop in fields(data, start, end):
        if message == "attribute" and number in _LISTS:
            # Attributes of tree ensembles have millions of entries and contain no tensor.
            parts.append(data.part(began, end))
            break
        large = kind == DELIMITED and stop - at > _LARGE
        inside = _INSIDE[message].get(number) if large else None
        if inside is not None:
            content = _without_weights(data, at, stop, inside)
            parts += [encode_varint(number << 3 | DELIMITED), encode_varint(len(content)), content]
        elif not (large and message == "tensor"):
            parts.append(data.part(began, stop))
        began = stop
    return b"".join(parts)


def operator_types(path: Path) -> frozenset[str]:
    """Return the operators of all nodes, with those of functions and nested graphs; empty for an unreadable file."""
    try:
        model = read_model(path)
    except UnreadableModel:
        return frozenset()
    graphs = (model.graph.node, *(function.node for function in model.functions))
    return frozenset(node.op_type for nodes in graphs for node in all_nodes(nodes))


def tensors_of_unknown_rank(path: Path) -> frozenset[str]:
    """Return the names of inputs and outputs declared without a shape; empty for a file that cannot be read."""
    try:
        graph = read_model(path).graph
    except UnreadableModel:
        return frozenset()
    return frozenset(
        value.name
        for value in (*graph.input, *graph.output)
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
    )


def graphs_in(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Return the graphs inside a node, but not those inside the nodes of these."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes, and those of the graphs inside them."""
    for node in nodes:
        yield node
        for graph in graphs_in(node):
            yield from all_nodes(graph.node)


def tensors_in(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers and the constants of a model."""
    yield from model.graph.initializer
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in all_nodes(nodes):
            yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))
            for graph in graphs_in(node):
                yield from graph.initializer


def _read_if_small(tensor: onnx.TensorProto, folder: Path) -> None:
    """Read a small tensor's numbers from its external data file."""
    if math.prod(tensor.dims) > _SMALL:
        return
    try:
        external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    except Exception:  # the numbers stay unknown; a node that needs them gives the reason
        return
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.DEFAULT


def constant(tensor: onnx.TensorProto) -> Value:
    """Return a tensor of the file, with its numbers if it is small."""
    shape = tuple(tensor.dims)
    return _content(tensor, shape) or Value(shape)


def _content(tensor: onnx.TensorProto, shape: tuple[int, ...]) -> Value | None:
    if math.prod(shape) > _SMALL or tensor.data_type not in _KEPT:
        return None
    if external_data_helper.uses_external_data(tensor):
        return None
    try:
        array = numpy_helper.to_array(tensor)
    except Exception:  # data of another length
        return None
    # NaN would be compared and ordered otherwise than in ONNX Runtime.
    if array.shape != shape or np.isnan(array).any():
        return None
    return Value(shape, content=array.astype(object))
