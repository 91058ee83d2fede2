"""Child process that loads a model once and measures batches of it.

In a process of its own the model has the memory to itself, and a crash of ONNX Runtime ends only this process.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tensorferry.server import malloc
from tensorferry.server.model_config.io_mapping import IoMapping
from tensorferry.server.runtime.fp16 import ModelFile
from tensorferry.server.runtime.ort_options import OrtOptions

# Time limit for loading the model.
LOAD_SECONDS = 300
# The limit of all runs is this many times the time that they may take, because the last prediction may be wrong.
LATE = 3


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model and the batches to measure.

    `working_size` is a length of the variable axes, besides the batch axis, with which the model runs; `lengths` has those
    of axes by name, which precede. All sizes together may take `seconds`.
    """

    file: ModelFile
    device: str
    ort_options: OrtOptions
    io_mapping: IoMapping
    working_size: int
    sizes: tuple[int, ...]
    seconds: float
    lengths: Mapping[str, int] = field(default_factory=dict)


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The default action of the signal ends the process even while native code runs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LOAD_SECONDS)
    # Libraries that print must not mix with the results.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    malloc.reuse_large_buffers()

    def send(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=results, flush=True)

    _measure(pickle.load(sys.stdin.buffer), send)


def _measure(model: MeasuredModel, send: Callable[[Mapping[str, Any]], None]) -> None:
    # Imported here, because the parent imports this module for its records.
    from tensorferry.server.inspection.batch_times import UnknownMemory, time_batches
    from tensorferry.server.inspection.memory_growth import GpuMemory, ResidentMemory
    from tensorferry.server.monitoring.gpu_metrics import open_nvml
    from tensorferry.server.runtime.devices import preload_libraries
    from tensorferry.server.runtime.host_memory import resident_bytes
    from tensorferry.server.runtime.sampling import random_inputs

    gpu = None
    if model.device != "cpu":
        preload_libraries()
        gpu = open_nvml()
    before = resident_bytes()
    session = model.file.session(model.device, model.ort_options)
    loaded = resident_bytes() - before
    memory: ResidentMemory | GpuMemory | UnknownMemory
    if model.device == "cpu":
        memory = ResidentMemory()
    else:
        memory = UnknownMemory() if gpu is None else GpuMemory(gpu, model.device)
    what = "" if isinstance(memory, UnknownMemory) else memory.what
    send({"loaded_bytes": loaded, "memory": what})
    signal.alarm(int(LATE * model.seconds) + 1)
    signature = model.io_mapping.signature
    stopped = time_batches(
        model.io_mapping.runner(session.run),
        lambda rows: random_inputs(signature, rows, model.working_size, sizes=model.lengths),
        model.sizes,
        lambda time: send(asdict(time)),
        memory=memory,
        seconds=model.seconds,
    )
    send({"stopped": stopped})


if __name__ == "__main__":
    _main()
