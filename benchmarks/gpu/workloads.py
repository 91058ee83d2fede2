"""Measured models: two on a GPU, and a small one of the same form for each on the CPU.

Latencies and lengths are those of MLPerf Inference's Server scenario at the 99th percentile: images
within 15 ms, questions about texts of 384 tokens within 130 ms. The small image model has a looser
bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from gpu.models import END, IDS, IMAGE, LOGITS, MASK, SEGMENTS, START, Bert, Resnet, build_bert, build_resnet

Array = npt.NDArray[Any]

BERT, RESNET = "bert", "resnet"
# Different requests; each is sent many times.
SAMPLES = 64
_DATATYPES = {"int64": "INT64", "uint8": "UINT8"}


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, how it is built and sampled, its latency bound in seconds, and its targets.

    `saturation` is the target of the server's throughput relative to the bare loop's,
    `latency_bounded` of the highest rate within the bound relative to the offline rate; `published` is the
    median of MLPerf Inference v4.1's systems.
    """

    name: str
    title: str
    model: Bert | Resnet
    outputs: tuple[str, ...]
    bound: float
    sizes: tuple[int, ...]
    saturation: float
    latency_bounded: float
    published: float

    @property
    def file(self) -> str:
        """Return the name of the model's file, unique to this form."""
        return f"gpu-{self.name}-{'half' if self.model.half else 'small'}.onnx"

    def write(self, folder: Path) -> Path:
        """Return the model's path; build it if it is missing."""
        path = folder / "models" / self.file
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            built = build_bert(self.model) if isinstance(self.model, Bert) else build_resnet(self.model)
            onnx.checker.check_model(built)
            part = path.with_suffix(".part")
            onnx.save(built, str(part))
            part.rename(path)
        return path

    def rows(self, count: int, first: int = 0) -> Mapping[str, Array]:
        """Return `count` rows of input; a row depends only on its number."""
        each = [self._row(number % SAMPLES) for number in range(first, first + count)]
        return {name: np.stack([row[name] for row in each]) for name in each[0]}

    def _row(self, number: int) -> dict[str, Array]:
        random, model = np.random.default_rng(number), self.model
        if isinstance(model, Resnet):
            return {IMAGE: random.integers(0, 256, (model.size, model.size, 3), np.uint8)}
        # Like questions about texts: of some length, then padding.
        length = int(random.integers(model.sequence // 3, model.sequence + 1))
        places = np.arange(model.sequence)
        return {
            IDS: np.where(places < length, random.integers(0, model.vocabulary, model.sequence), 0),
            MASK: (places < length).astype(np.int64),
            SEGMENTS: ((places >= length // 4) & (places < length)).astype(np.int64),
        }

    def request(self, count: int, first: int = 0) -> bytes:
        """Return a serialised ModelInferRequest of these rows."""
        from tensorferry.protos import inference_pb2 as pb

        message = pb.ModelInferRequest(model_name=self.name)
        for name, array in self.rows(count, first).items():
            message.inputs.add(name=name, datatype=_DATATYPES[array.dtype.name], shape=array.shape)
            message.raw_input_contents.append(array.tobytes())
        return message.SerializeToString()

    def answer(self, response: bytes) -> dict[str, Array]:
        """Return the outputs in a serialised ModelInferResponse, in float32."""
        from tensorferry.protos import inference_pb2 as pb

        message = pb.ModelInferResponse.FromString(response)
        dtype = np.float16 if self.model.half else np.float32
        return {
            output.name: np.frombuffer(raw, dtype).reshape(output.shape).astype(np.float32)
            for output, raw in zip(message.outputs, message.raw_output_contents, strict=True)
        }

    @property
    def answer_bytes(self) -> int:
        """Bytes of the tensors of one answer, the least size of a response."""
        width = self.model.sequence if isinstance(self.model, Bert) else 1000
        return width * len(self.outputs) * (2 if self.model.half else 4)


_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)


def _bert(title: str, model: Bert, sizes: tuple[int, ...]) -> Workload:
    return Workload(BERT, title, model, (START, END), 0.130, sizes, 0.95, 0.85, 0.79)


def _resnet(title: str, model: Resnet, sizes: tuple[int, ...], bound: float) -> Workload:
    return Workload(RESNET, title, model, (LOGITS,), bound, sizes, 0.80, 0.90, 0.89)


ON_GPU: Mapping[str, Workload] = {
    BERT: _bert("BERT-base, 384 tokens, FP16", Bert(), _POWERS),
    RESNET: _resnet("ResNet-50, uint8 images of 224 × 224, FP16", Resnet(), _POWERS, 0.015),
}
# On one core a batch of one takes one to a few milliseconds.
ON_CPU: Mapping[str, Workload] = {
    BERT: _bert(
        "a BERT of 4 layers of 128, 64 tokens, FP32",
        Bert(layers=4, hidden=128, heads=4, sequence=64, vocabulary=2000, half=False),
        _POWERS[:5],
    ),
    RESNET: _resnet(
        "a ResNet of 4 blocks of 16 channels and more, uint8 images of 64 × 64, FP32",
        Resnet(blocks=(1, 1, 1, 1), width=16, size=64, half=False),
        _POWERS[:5],
        # Small machines are often shared: other work may take a core for up to 15 ms.
        0.060,
    ),
}


def workload_of(name: str, *, small: bool) -> Workload:
    """Return a workload by name; `small` for the CPU."""
    return (ON_CPU if small else ON_GPU)[name]
