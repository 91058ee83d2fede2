"""Measuring of a model's batches, in a child process.

In a process of its own the model has the memory to itself, and a crash of ONNX Runtime ends only this process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tensorferry.server.errors import ServerError, StartError
from tensorferry.server.models.config_pbtxt.io_mapping import IoMapping
from tensorferry.server.onnx.measuring.batch_sizes import best_size
from tensorferry.server.onnx.measuring.batch_times import BatchTime, time_batches
from tensorferry.server.onnx.measuring.core_layouts import Layout, time_layouts
from tensorferry.server.onnx.measuring.memory_growth import GpuMemory, ResidentMemory
from tensorferry.server.runtime.checks.sampling import Array, random_inputs
from tensorferry.server.runtime.devices import preload_libraries
from tensorferry.server.runtime.files.fp16 import ModelFile
from tensorferry.server.runtime.gpu.gpu_readings import open_nvml
from tensorferry.server.runtime.host_memory import GrowthCheck, resident_bytes
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.system import malloc

# Time limit for loading the model.
LOAD_SECONDS = 300
# The limit of one run is this many times the time that all may take, because the last prediction may be wrong.
LATE = 3


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model and the batches to measure.

    `working_size` is a length of the variable axes, besides the batch axis, with which the model runs; `lengths` has those
    of axes by name, which precede. All sizes and then all layouts of the cores together may take `seconds`.
    With `background`, other processes come first.
    """

    file: ModelFile
    device: str
    ort_options: OrtOptions
    io_mapping: IoMapping
    working_size: int
    sizes: tuple[int, ...]
    seconds: float
    lengths: Mapping[str, int] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = ()
    background: bool = False


def measure(model: MeasuredModel, send: Callable[[Mapping[str, Any]], None]) -> None:
    """Measure the batches, and send what loading took, each size, why larger ones are missing, and each layout."""
    if model.background:
        os.nice(19)
    malloc.reuse_large_buffers()
    gpu = None
    if model.device != "cpu":
        preload_libraries()
        gpu = open_nvml()
    before = resident_bytes()
    session = model.file.session(model.device, model.ort_options)
    loaded = resident_bytes() - before
    memory: ResidentMemory | GpuMemory | None = None
    if model.device == "cpu":
        memory = ResidentMemory()
    elif gpu is not None:
        memory = GpuMemory(gpu, model.device)
    send({"loaded_bytes": loaded, "memory": "" if memory is None else memory.what})
    signature = model.io_mapping.signature
    began = time.monotonic()
    times: list[BatchTime] = []

    def inputs_of(rows: int) -> Mapping[str, Array]:
        return random_inputs(signature, rows, model.working_size, sizes=model.lengths)

    def measured(batch: BatchTime) -> None:
        times.append(batch)
        send(asdict(batch))

    stopped = time_batches(
        model.io_mapping.runner(session.run),
        inputs_of,
        model.sizes,
        measured,
        memory=memory,
        seconds=model.seconds,
    )
    send({"stopped": stopped})
    del session
    if times and model.layouts:
        _measure_layouts(model, times, inputs_of, lambda: time.monotonic() - began < model.seconds, send)


def _measure_layouts(
    model: MeasuredModel,
    times: Sequence[BatchTime],
    inputs_of: Callable[[int], Mapping[str, Array]],
    may_go_on: Callable[[], bool],
    send: Callable[[Mapping[str, Any]], None],
) -> None:
    room = GrowthCheck()

    def runs_of(layout: Layout) -> list[Callable[[Mapping[str, Array]], Any]]:
        options = replace(model.ort_options, intra_op_threads=layout.threads)
        runs = []
        for number in range(layout.sessions):
            room.check(f"session {number + 1} of {layout.sessions}", "give --no-measure", steps=number)
            runs.append(model.io_mapping.runner(model.file.session(model.device, options).run))
        return runs

    best = best_size(times)
    assert best is not None
    # The sizes have been measured, so a machine without the memory for more sessions is no failure.
    with suppress(ServerError, StartError):
        for layout in time_layouts(model.layouts, runs_of, best.rows, inputs_of, may_go_on):
            send({"layout": asdict(layout)})
