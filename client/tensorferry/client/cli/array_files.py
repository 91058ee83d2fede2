"""Array files of the shell commands, read and written without pickle."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from tensorferry.client.errors import InvalidInput
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Raise ValueError in place of the many other errors that numpy and zipfile raise for damaged files."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


@_damage()
def read_array(file: BinaryIO) -> Array:
    """Read the array of an open .npy file; raise OSError or ValueError if it is unsafe or malformed.

    numpy writes bfloat16 as two opaque bytes, dtype V2. They are read as BF16.
    """
    array: Array = np.lib.format.read_array(file, allow_pickle=False)
    if array.dtype == np.dtype("V2"):
        return tensors.values(array.view("<u2"), "BF16")
    return array


@_damage()
def read_archive(path: Path) -> dict[str, Array]:
    """Read the arrays of a .npz file, by name; raise OSError or ValueError if it is malformed."""
    with zipfile.ZipFile(path) as archive:
        arrays = {}
        for member in archive.namelist():
            with archive.open(member) as file:
                arrays[member.removesuffix(".npy")] = read_array(cast(BinaryIO, file))
    return arrays


def write_archive(path: Path, outputs: Mapping[str, Array]) -> None:
    """Write arrays to a .npz file, with the dtypes of `write_array`.

    Raises InvalidInput for elements of BYTES that end with a zero byte, before anything is written.
    """
    arrays = {}
    for name, array in outputs.items():
        if not _is_storable(array):
            received = f"elements of output {name!r} that end with a zero byte"
            change = "use --output-dir or --format json"
            raise InvalidInput("--output-file", "BYTES that a .npz file can hold", received, change)
        arrays[name] = _stored(array)
    # numpy.savez takes names as keyword arguments, so it refuses an array called "file".
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def write_array(directory: Path, name: str, array: Array, taken: set[Path]) -> Path:
    """Write an output to a file in the directory; add its path to `taken` and return it.

    The file is NAME.npy, with BYTES as fixed-width strings and BF16 as float32; both lose nothing.
    numpy's strings drop trailing zero bytes, so BYTES with such elements go to NAME.jsonl: an
    object with datatype and shape, then one base64 string per element in row-major order.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "_"
    storable = _is_storable(array)
    path = _free(directory, stem, ".npy" if storable else ".jsonl", taken)
    if storable:
        np.save(path, _stored(array), allow_pickle=False)
    else:
        lines = [json.dumps({"datatype": "BYTES", "shape": list(array.shape)})]
        lines += [json.dumps(base64.b64encode(element).decode()) for element in array.flat]
        path.write_text("\n".join(lines) + "\n")
    return path


def _is_storable(array: Array) -> bool:
    return array.dtype != object or not any(element.endswith(b"\0") for element in array.flat)


def _stored(array: Array) -> Array:
    """Return an array of a dtype that .npy files have."""
    if array.dtype == object:
        return array.astype(np.bytes_)
    return array.astype(np.float32) if tensors.datatype_of(array) == "BF16" else array


def _free(directory: Path, stem: str, suffix: str, taken: set[Path]) -> Path:
    # Two names may become the same when sanitised; files of earlier runs are replaced.
    path, number = directory / f"{stem}{suffix}", 1
    while path in taken:
        number += 1
        path = directory / f"{stem}-{number}{suffix}"
    taken.add(path)
    return path
