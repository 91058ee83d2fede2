"""Models with operators of onnxruntime-extensions: a tokeniser, an image decoder."""

from __future__ import annotations

import json
import struct
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.models.small import node, save, value
from support.server.rig import Array

# The tokens of `tokenizer`, by number. The fifth stands for a space before a word.
VOCABULARY = ("<|endoftext|>", "a", "b", "c", "Ġ", "ab", "abc")
_MERGES = "#version: 0.2\na b\nab c\n"


def skip_without() -> None:
    """Skip the test if the package is missing. It is not imported, because that sets a variable that servers inherit."""
    if find_spec("onnxruntime_extensions") is None:
        pytest.skip("needs onnxruntime-extensions")


def tokenizer(path: Path, length: int | None = 8) -> Path:
    """text BYTES [batch] → ids and mask INT64 [batch, length], or without a length [batch, longest of the batch]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dims = ("batch", "length" if length is None else length)
    return save(
        path,
        [
            node(
                "GPT2Tokenizer",
                "text",
                "ids mask",
                domain="ai.onnx.contrib",
                vocab=json.dumps({token: number for number, token in enumerate(VOCABULARY)}),
                merges=_MERGES,
                padding_length=-1 if length is None else length,
            )
        ],
        [value("text", "BYTES", ["batch"])],
        [value("ids", "INT64", dims), value("mask", "INT64", dims)],
    )


def image_decoder(path: Path) -> Path:
    """data UINT8 [bytes of a file] → image UINT8 [height, width, 3]."""
    return save(
        path,
        [node("DecodeImage", "data", "image", domain="com.microsoft.extensions", color_space="rgb")],
        [value("data", "UINT8", ["bytes"])],
        [value("image", "UINT8", ["height", "width", 3])],
    )


def png(image: Array) -> bytes:
    """Return the file of an image of UINT8 [height, width, 3]."""
    height, width, _ = image.shape
    rows = b"".join(b"\0" + row.tobytes() for row in image)

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
