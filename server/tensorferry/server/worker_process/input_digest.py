"""Hash of a request's inputs, by which a request that ended a process is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorferry.server.worker_process.array_memory import Array


def digest_of_inputs(model: str, inputs: Mapping[str, Array]) -> str:
    """Return a hash of the model's name and of the names, datatypes, shapes and values of its inputs."""
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, model.encode())
    for name, array in sorted(inputs.items()):
        _add(digest, f"{name} {array.dtype.str} {array.shape}".encode())
        if array.dtype.hasobject:
            for element in array.ravel().tolist():
                _add(digest, type(element).__name__.encode())
                _add(digest, element if isinstance(element, bytes) else repr(element).encode())
        else:
            _add(digest, np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _add(digest: Any, part: bytes) -> None:
    # With the length, so that parts cannot be divided in another way.
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
