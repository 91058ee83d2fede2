"""Inputs and results of a function in the form that is sent: arrays of numbers are placed in shared memory.

What is sent contains only numbers, text, bytes, None and containers of them. So the server never needs the user's classes
to read it, and never runs their code. Inputs are known again by their hash.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.server.processes.functions.arrays import Array, ArrayMemory, ArrayRef

# Sent as they are.
_PLAIN = frozenset({str, bytes, int, float, bool, complex, type(None)})


class _Objects(NamedTuple):
    """An array of objects: strings, bytes, or arrays of different shapes."""

    shape: tuple[int, ...]
    elements: list[Any]


def encode(value: Any, memory: ArrayMemory | None, what: str) -> Any:
    """Return the form of a value that can be sent. TypeError, which names the part of the value, if there is none.

    Without memory, arrays are sent with the message.
    """
    kind = type(value)
    if kind is np.ndarray:
        if value.dtype.metadata is not None and not value.dtype.names:
            value = value.view(value.dtype.str)
        if value.dtype.kind == "T":
            value = value.astype(object)
        if value.dtype != object and _has_objects(value.dtype):
            raise TypeError(f"{what} is an array of dtype {value.dtype}, which a child process cannot send")
        if value.dtype != object:
            return value if memory is None else memory.put(value)
        return _Objects(value.shape, _encode_list(value.ravel().tolist(), memory, f"an element of {what}"))
    if kind in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {_key(key, what): encode(each, memory, f"{what}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        elements = _encode_list(value, memory, f"an element of {what}")
        return tuple(elements) if isinstance(value, tuple) else elements
    # Subclasses, such as members of an enum, and `numpy.str_`.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, np.generic):
        # A plain one, because its class may be the user's.
        return encode(np.asarray(value), None, what)[()]
    if isinstance(value, (int, float)) or hasattr(value, "__array__"):
        return encode(np.asarray(value), memory, what)
    raise TypeError(
        f"{what} is of type {kind.__module__}.{kind.__qualname__}, which a child process cannot send; give numpy arrays, "
        "numbers, str or bytes, or dicts, lists and tuples of them"
    )


def dumps(sent: Any) -> bytes:
    """Return the content of a message with what `encode` has returned, or with a record of an error."""
    return pickle.dumps(sent, pickle.HIGHEST_PROTOCOL)


def loads(content: bytes, memory: ArrayMemory | None) -> Any:
    """Return the value that `encode` was given. Nothing of it is a view of the memory."""
    return _decode(pickle.loads(content), memory)


def _decode(sent: Any, memory: ArrayMemory | None) -> Any:
    kind = type(sent)
    if kind is ArrayRef and memory is not None:
        return memory.get(sent)
    if kind is dict:
        return {key: _decode(each, memory) for key, each in sent.items()}
    if kind is _Objects:
        elements = _decode_list(sent.elements, memory)
        array: npt.NDArray[Any] = np.fromiter(elements, object, len(elements))
        return array.reshape(sent.shape)
    if kind is list:
        return _decode_list(sent, memory)
    if kind is tuple:
        return tuple(_decode_list(sent, memory))
    return sent


def _has_objects(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype has objects of the user, as elements or in its metadata."""
    if dtype.hasobject or dtype.metadata is not None:
        return True
    return any(_has_objects(field[0]) for field in (dtype.fields or {}).values())


def _key(key: object, what: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{what} has the key {key!r}; the keys must be names")
    return str.__str__(key)


def _encode_list(elements: Any, memory: ArrayMemory | None, what: str) -> list[Any]:
    # Without a call for each of many strings.
    if _PLAIN.issuperset(map(type, elements)):
        return list(elements)
    return [encode(each, memory, what) for each in elements]


def _decode_list(elements: Any, memory: ArrayMemory | None) -> list[Any]:
    if _PLAIN.issuperset(map(type, elements)):
        return list(elements)
    return [_decode(each, memory) for each in elements]


def digest_of_inputs(model: str, inputs: Mapping[str, Array]) -> str:
    """Return a hash of the model's name and of the names, datatypes, shapes and values of its inputs."""
    digest = hashlib.blake2b(digest_size=16)

    def add(part: bytes) -> None:
        # With the length, so that parts cannot be divided in another way.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    add(model.encode())
    for name, array in sorted(inputs.items()):
        add(f"{name} {array.dtype.str} {array.shape}".encode())
        if array.dtype.hasobject:
            for element in array.ravel().tolist():
                add(type(element).__name__.encode())
                add(element if isinstance(element, bytes) else repr(element).encode())
        else:
            add(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
