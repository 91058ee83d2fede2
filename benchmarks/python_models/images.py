"""JPEG decoding in worker processes before an image model: images per second, and how busy the model is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gpu.models import IMAGE, Resnet, build_resnet
from python_models.calls import Call, app_command, computed, measured, started
from serving.load import shape_of
from serving.measure import Bench
from serving.peers.settings import Engine
from serving.processes import Running

Row = Mapping[str, Any]

PART = "images"
PROCESSES = (1, 2, 4)
# Instead of processes, for calls with ready pixels.
NO_DECODING = 0
CLASSIFIER, CLASSIFY = "classifier", "classify"
MODEL = Resnet(blocks=(1, 1, 1, 1), width=8, half=False)
IN_FLIGHT = 32
_FILES = 16
_SECONDS, _WARM_UP = 4.0, 1.0


def write_model(folder: Path) -> Path:
    """Return the path of the image model, written to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "classifier.onnx"
    onnx.save(build_resnet(MODEL), str(path))
    return path


def calls(path: Path) -> tuple[list[Call], list[Call]]:
    """Return calls with JPEG files, and with ready pixels."""
    from python_models.pictures import files, pixels

    with_files, with_pixels = [], []
    for file in files(_FILES):
        image = pixels(file)[None]
        answer = Engine(path).run(image)
        with_files.append(Call(CLASSIFY, {"jpeg": np.array([file], object)}, answer))
        with_pixels.append(Call(CLASSIFIER, {IMAGE: image}, answer))
    return with_files, with_pixels


def measure(bench: Bench, number: int, shortened: float) -> Iterator[Row]:
    """Yield one round: images per second with each number of processes, and with ready pixels.

    `bench` shares all cores between server and load.
    """
    path = write_model(bench.cache / "models")
    with_files, with_pixels = calls(path)
    for processes in PROCESSES[::-1] if number % 2 else PROCESSES:
        variables = {"SERVING_BENCH_MODEL": str(path), "PYTHON_MODELS_PROCESSES": str(processes)}
        with started(bench, app_command("images"), "", variables, [*with_files, *with_pixels]) as serving:
            yield _row(bench, serving, with_files, number, processes, shortened)
            if processes == PROCESSES[0]:
                yield _row(bench, serving, with_pixels, number, NO_DECODING, shortened)


def _row(
    bench: Bench, serving: Running, some: Sequence[Call], number: int, processes: int, shortened: float
) -> Row:
    shape = shape_of("unary", IN_FLIGHT, False)
    before = computed(serving.port, CLASSIFIER)
    row = measured(bench, serving, some, shape, _SECONDS * shortened, _WARM_UP)
    images, seconds = (
        after - was for after, was in zip(computed(serving.port, CLASSIFIER), before, strict=True)
    )
    found = {
        "part": PART,
        "round": number,
        "processes": processes,
        "busy": row["rate"] * seconds / images,
        **{name: row[name] for name in ("rate", "p50_ms", "p99_ms", "server_cores", "other_cores")},
    }
    print(
        f"images, {processes or 'no'} processes: {found['rate']:7.0f}/s  model busy {found['busy']:4.0%}  "
        f"cores {found['server_cores']:.2f}  p50 {found['p50_ms']:.1f} ms",
        flush=True,
    )
    return found
