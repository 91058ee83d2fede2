"""Remedies for files that ONNX Runtime cannot load, found by the file's content or the error message."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tensorferry.server.runtime.files.op_libraries import (
    EXTENSION_DOMAINS,
    EXTENSIONS,
    INSTALL_EXTENSIONS,
    OWN_DOMAINS,
    OpLibrary,
)

_PYTORCH = "a PyTorch file, not ONNX: export it with torch.onnx.export"
# Keys are the first bytes of a file.
_KINDS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the model: fetch the model with git lfs pull"),
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", _PYTORCH),
    (
        b"\x80",
        "a Python pickle, not ONNX: export the model, with torch.onnx.export (PyTorch) or skl2onnx (scikit-learn)",
    ),
    (b"\x89HDF", "an HDF5 file (Keras), not ONNX: convert it with tf2onnx"),
    (b"\x1f\x8b", "compressed with gzip: unpack it with gunzip"),
    (b"<", "a web page or XML, not ONNX: the download may have failed, or this is another format"),
)
# At offsets 4 and 8.
_TFLITE, _SAFETENSORS = b"TFL3", b'{"'
_HEAD_BYTES = 64

_LOCALE = re.compile(r"Failed to construct locale with name:\s*([\w.@-]+?):")
# Such as: Fatal error: com.acme:Foo(-1) is not a registered function/op
_UNKNOWN_OPERATOR = re.compile(r"([\w.-]+):([\w.-]+)\(-?\d+\) is not a registered function/op")
# Patterns of an error message, and the remedy, which may name what the pattern found.
_REASONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"Unsupported model IR version|only \*guarantees\* support for models stamped"),
        "The file is newer than this onnxruntime: upgrade onnxruntime, or export the model with an older opset and onnx package",
    ),
    (
        # The second form is that of older versions.
        re.compile(
            r'(?:External data path does not exist: "?|cannot get file size: No such file or directory \[)([^"\]]+)'
        ),
        "The model's weights are in a file of their own: copy {} from where the model comes from",
    ),
)
_NOT_PARSED = "Protobuf parsing failed"


def remedy_for(path: Path, reason: str, libraries: Sequence[OpLibrary] = ()) -> str:
    """Return a sentence with the remedy, to append to the reason; empty if none is known.

    `libraries` are those of custom operators that the session has.
    """
    if (found := _UNKNOWN_OPERATOR.search(reason)) and found[1] not in OWN_DOMAINS:
        return _library_remedy(found[1], libraries)
    if found := _LOCALE.search(reason):
        name = found[1]
        return (
            f". The machine lacks the locale {name}: apt-get install locales && localedef -i {name.partition('.')[0]} "
            f"-f UTF-8 {name} (Debian, Ubuntu), or dnf install glibc-langpack-{name.partition('_')[0]} (Fedora)"
        )
    for pattern, remedy in _REASONS:
        if found := pattern.search(reason):
            return f". {remedy.format(*found.groups())}"
    if kind := _kind_of(path):
        return f". It is {kind}"
    if _NOT_PARSED in reason:
        return ". It is not ONNX, or only a part of a file: compare its size with the original"
    return ""


def _library_remedy(domain: str, libraries: Sequence[OpLibrary]) -> str:
    tried = ", ".join(str(library.path) for library in libraries)
    tried = f". It is not among the custom operators of {tried}" if libraries else ""
    if domain in EXTENSION_DOMAINS:
        own = any(library.own_domains for library in libraries)
        what = "upgrade that package" if own else f"give --custom-ops {EXTENSIONS}"
        return f"{tried}. Operators of {domain} are in the package {EXTENSIONS}: {INSTALL_EXTENSIONS}, and {what}"
    return (
        f"{tried}. Operators of {domain} are in a library of custom operators: name its file by --custom-ops, or as "
        "op_library_filename in the model's config.pbtxt"
    )


def _kind_of(path: Path) -> str:
    """Describe a file that is not ONNX; empty if its format is unknown."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            torch = any(name.endswith("data.pkl") for name in names)
            return _PYTORCH if torch else "a zip archive: unpack it and give the .onnx file in it"
    # An archive's names may be no UTF-8, and its version may be unknown.
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return ""
    if not head:
        return "empty: the copy or download may have failed"
    for start, kind in _KINDS:
        if head.startswith(start):
            return kind
    if head[4:8] == _TFLITE:
        return "a TensorFlow Lite file, not ONNX: convert it with tf2onnx"
    if head[8:10] == _SAFETENSORS:
        return "a safetensors file, which has weights alone: export the model with torch.onnx.export"
    return ""
