"""The example of pictures: files in, labels out; files that are no pictures fail alone."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from e2e.fixtures import Serve

from tensorferry.client import InferenceClient, InferenceError
from tensorferry.serving import InvalidInput

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "images"
DIGITS = EXAMPLE.parent / "digits" / "digits.onnx"
PICTURES = sorted([*EXAMPLE.glob("*.jpg"), *EXAMPLE.glob("*.png")])
THREE = EXAMPLE / "three.jpg"

pytestmark = pytest.mark.skipif(
    find_spec("PIL") is None and not os.environ.get("CI"), reason="needs the package Pillow"
)


@pytest.fixture(scope="module")
def app() -> ModuleType:
    spec = spec_from_file_location("images_app", EXAMPLE / "app.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def png(width: int, height: int) -> bytes:
    """Return the beginning of a PNG file that says to have this size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


BROKEN = [
    b"",
    b"no picture",
    THREE.read_bytes()[:2000],
    (EXAMPLE / "zero.png").read_bytes()[:2000],
    png(8, 8),
    png(60_000, 60_000),
    b"GIF89a\x01\x00\x01\x00\x00\x00\x00,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00;",
]


def test_each_picture_gets_its_label_beside_files_that_are_no_pictures(serve: Serve) -> None:
    assert len(PICTURES) == 10
    server = serve(EXAMPLE / "app.py", DIGITS)
    with InferenceClient(server.address) as client:
        good = [client.submit("classify", {"file": [each.read_bytes()]}) for each in PICTURES * 3]
        bad = [client.submit("classify", {"file": [each]}) for each in BROKEN]
        for picture, future in zip(PICTURES * 3, good, strict=True):
            result = future.result(60)
            assert result["label"].tolist() == [picture.stem.encode()]
            assert result["probability"] == result["probabilities"].max() > 0.9
        for file, future in zip(BROKEN, bad, strict=True):
            error = future.exception(60)
            assert isinstance(error, InferenceError)
            assert error.code.name == "INVALID_ARGUMENT"
            begins = f"a file of {len(file)} bytes that begins with {file[:8]!r} cannot be read; send a JPEG"
            assert begins in str(error)
        together = client.infer("classify", {"file": [each.read_bytes() for each in PICTURES]})
    assert together["label"].tolist() == [each.stem.encode() for each in PICTURES]


def converted(mode: str) -> Callable[[Any], Any]:
    return lambda picture: picture.convert(mode)


@pytest.mark.parametrize(
    ("form", "change"),
    [("JPEG", converted(mode)) for mode in ("L", "RGB", "CMYK")]
    + [("PNG", converted(mode)) for mode in ("L", "RGB", "RGBA", "LA", "P")],
)
def test_pictures_of_all_modes_have_the_same_pixels(
    app: ModuleType, form: str, change: Callable[[Any], Any]
) -> None:
    from PIL import Image

    file = io.BytesIO()
    with Image.open(THREE) as picture:
        change(picture).save(file, form)
    assert pixels(app, file.getvalue()) == pytest.approx(pixels(app, THREE.read_bytes()), abs=1)


def test_a_picture_from_a_turned_camera_is_upright(app: ModuleType) -> None:
    from PIL import Image

    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # Orientation: turn it clockwise to show it.
    with Image.open(THREE) as picture:
        picture.transpose(Image.Transpose.ROTATE_90).save(file, "JPEG", exif=exif)
    assert pixels(app, file.getvalue()) == pytest.approx(pixels(app, THREE.read_bytes()), abs=1)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_raise_nothing_else_than_invalid_input(app: ModuleType, seed: int) -> None:
    random = np.random.default_rng(seed)
    whole = [THREE.read_bytes(), (EXAMPLE / "zero.png").read_bytes()]
    refused = 0
    for number in range(100):
        file = bytearray(whole[number % 2])
        for place in random.integers(0, 600, 5):
            file[place] = random.integers(0, 256)
        try:
            found = pixels(app, bytes(file))
        except InvalidInput:
            refused += 1
        else:
            assert found.shape == (8, 8)
            assert found.max() <= 16
    assert refused > 20


def pixels(app: ModuleType, file: bytes) -> npt.NDArray[np.float32]:
    found = app.pixels(file)
    assert found.dtype == np.uint8
    return np.asarray(found, np.float32)
