"""Array files of the shell commands, read and written without pickle."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np

from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array


def read_array(path: Path) -> Array:
    """Read the array of a .npy file; raise OSError or ValueError if it is unsafe or malformed.

    numpy writes bfloat16 as two opaque bytes, dtype V2. They are read as BF16.
    """
    with path.open("rb") as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    if array.dtype == np.dtype("V2"):
        return tensors.values(array.view("<u2"), "BF16")
    return array


def write_array(directory: Path, name: str, array: Array, taken: set[Path]) -> Path:
    """Write an output to a file in the directory; add its path to `taken` and return it.

    The file is NAME.npy, with BYTES as fixed-width strings and BF16 as float32; both lose nothing.
    numpy's strings drop trailing zero bytes, so BYTES with such elements go to NAME.jsonl: an
    object with datatype and shape, then one base64 string per element in row-major order.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "_"
    lossless = array.dtype != object or not any(element.endswith(b"\0") for element in array.flat)
    path = _free(directory, stem, ".npy" if lossless else ".jsonl", taken)
    if not lossless:
        lines = [json.dumps({"datatype": "BYTES", "shape": list(array.shape)})]
        lines += [json.dumps(base64.b64encode(element).decode()) for element in array.flat]
        path.write_text("\n".join(lines) + "\n")
    elif array.dtype == object:
        np.save(path, array.astype(np.bytes_), allow_pickle=False)
    elif tensors.datatype_of(array) == "BF16":
        np.save(path, array.astype(np.float32), allow_pickle=False)
    else:
        np.save(path, array, allow_pickle=False)
    return path


def _free(directory: Path, stem: str, suffix: str, taken: set[Path]) -> Path:
    # Two names may become the same when sanitised; files of earlier runs are replaced.
    path, number = directory / f"{stem}{suffix}", 1
    while path in taken:
        number += 1
        path = directory / f"{stem}-{number}{suffix}"
    taken.add(path)
    return path
