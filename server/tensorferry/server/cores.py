"""Cores of the machine or container, and their division between front-ends, the engine and ONNX Runtime."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_DEVICES = Path("/dev")
# Relative to the package onnxruntime; only onnxruntime-gpu has it.
_CUDA_PROVIDER = "capi/libonnxruntime_providers_cuda.so"

# One engine on a core of its own answers 70,000 to 92,000 small requests per second, one front-end 26,000.
_MOST_FRONT_ENDS = 4
# With models on GPUs: one core for the engine's interpreter, and one for the thread that starts kernels.
_ENGINE_CORES_WITH_GPU = 2
_LEAST_CORES_WITH_GPU = 4
# The graph nodes that a GPU does not support are small, such as computations of shapes.
_MOST_THREADS_WITH_GPU = 4
# With models on the CPU, front-ends take an eighth of the cores. One front-end alone gains too little.
_CORES_PER_FRONT_END = 8
_LEAST_CORES_WITHOUT_GPU = 2 * _CORES_PER_FRONT_END


def usable_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Return the number of cores that the process may use.

    That is the number of its affinity, or the quota of its cgroup (version 2) if less. A part of a core counts as one.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, cpu_max.read_text().split())
    except (OSError, ValueError):
        # There is no cgroup, or its quota is "max".
        return allowed
    return max(1, min(allowed, math.ceil(quota / period)))


def models_use_gpu(device: str, devices: Path = _DEVICES) -> bool:
    """Return whether models of a --device run on a GPU by default.

    `auto` is decided by the driver's device files and ONNX Runtime's CUDA provider, because the supervisor must load neither
    of them. The engine may still fall back to the CPU if CUDA does not work.
    """
    if device != "auto":
        return device != "cpu"
    runtime = find_spec("onnxruntime")
    if runtime is None or runtime.origin is None:
        return False
    provider = Path(runtime.origin).parent / _CUDA_PROVIDER
    return provider.exists() and any(devices.glob("nvidia[0-9]*"))


def runtime_threads(cores: int, front_ends: int, *, gpu: bool) -> int:
    """Return the number of ONNX Runtime's threads for a session of an engine with front-ends.

    Front-ends and the engine have a core each, and the session has the others, on a GPU at most four. On the CPU it has at least
    half of all cores, because front-ends need little of theirs while a large model computes.
    """
    left = cores - front_ends - 1
    return max(1, min(left, _MOST_THREADS_WITH_GPU) if gpu else max(left, cores // 2))


@dataclass(frozen=True, slots=True)
class Division:
    """Division of `cores` with a number of front-ends; 0 for a server of one process."""

    cores: int
    front_ends: int
    gpu: bool

    @classmethod
    def automatic(cls, cores: int, *, gpu: bool) -> Division:
        """Return the division of `--front-ends auto`."""
        if gpu:
            most, enough = cores - _ENGINE_CORES_WITH_GPU, cores >= _LEAST_CORES_WITH_GPU
        else:
            most, enough = cores // _CORES_PER_FRONT_END, cores >= _LEAST_CORES_WITHOUT_GPU
        return cls(cores, min(most, _MOST_FRONT_ENDS) if enough else 0, gpu)

    def __str__(self) -> str:
        """Return the line of the log."""
        where = "a GPU" if self.gpu else "the CPU"
        have = f"{self.cores} core{'s' if self.cores > 1 else ''}, models on {where}"
        if not self.front_ends:
            least = _LEAST_CORES_WITH_GPU if self.gpu else _LEAST_CORES_WITHOUT_GPU
            return f"{have}: one process does all, because front-ends need {least} cores"
        threads = runtime_threads(self.cores, self.front_ends, gpu=self.gpu)
        return f"{have}: front-ends {self.front_ends}, engine 1, threads of ONNX Runtime for each session {threads}"
