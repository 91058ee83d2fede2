"""Division of the machine and of the limits between server processes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.system.cores import session_threads, usable_cores

_DEVICES = Path("/dev")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Relative to the package onnxruntime; only onnxruntime-gpu has it.
_CUDA_PROVIDER = "capi/libonnxruntime_providers_cuda.so"

# Of `auto` on a CPU. Batches are formed in each process, so that few processes batch better than many.
_CORES_PER_PROCESS = 4
_MOST_PROCESSES = 8

# Age at which clients are asked to reconnect, so that the kernel divides their connections again.
CONNECTION_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Division:
    """Number of processes of a server on `cores`, and the GPUs of each, by their numbers; no GPUs if all see the same."""

    cores: int
    processes: int
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the line of the log."""
        have = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        if self.processes == 1:
            return f"{have}: one process"
        threads = session_threads(self.cores, self.processes)
        gpus = f", GPUs {' and '.join(self.gpus)}" if self.gpus else ""
        return (
            f"{have}: {self.processes} server processes{gpus}, each with all models in its memory, and with {threads} "
            f"thread{'s' if threads > 1 else ''} for each session on a CPU"
        )


def division_of(config: ServerConfig) -> Division:
    """Return the division of the option --processes."""
    cores, gpus = usable_cores(), used_gpus(config.values("device"), os.environ)
    processes = config.processes
    if processes is None:
        processes = len(gpus) or min(max(1, cores // _CORES_PER_PROCESS), _MOST_PROCESSES)
    return Division(cores, processes, divided_gpus(gpus, processes))


def used_gpus(
    devices: Sequence[str], environment: Mapping[str, str], folder: Path = _DEVICES
) -> Sequence[str]:
    """Return the numbers of the GPUs that models of these --device may use; none if a --device names one GPU.

    The driver's device files and ONNX Runtime's CUDA provider decide, because the supervisor must load neither of them.
    """
    if any(device not in ("auto", "cuda") for device in devices):
        return ()
    runtime = find_spec("onnxruntime")
    if runtime is None or runtime.origin is None:
        return ()
    if not (Path(runtime.origin).parent / _CUDA_PROVIDER).exists():
        return ()
    visible = environment.get(_VISIBLE)
    if visible is not None:
        # As in CUDA, -1 ends the list.
        numbers = takewhile(lambda number: not number.startswith("-"), map(str.strip, visible.split(",")))
        return [number for number in numbers if number]
    # CUDA counts the GPUs of a container from 0, and their files there have the numbers of the machine.
    return [str(number) for number, _ in enumerate(folder.glob("nvidia[0-9]*"))]


def divided_gpus(gpus: Sequence[str], processes: int) -> tuple[str, ...]:
    """Return the GPUs of each process, with commas; none if there is one process or one GPU."""
    if processes == 1 or len(gpus) < 2:
        return ()
    if processes >= len(gpus):
        return tuple(gpus[index % len(gpus)] for index in range(processes))
    return tuple(",".join(gpus[index::processes]) for index in range(processes))


def share_of(config: ServerConfig, processes: int) -> ServerConfig:
    """Return the configuration with a process's part of the limits and quotas, rounded up because 0 is no limit.

    Connections have an age, unless the operator gives another: a process that replaced another has none of the old ones.
    """

    def part(limit: int) -> int:
        return math.ceil(limit / processes)

    def part_of_bytes(limit: int, one: ServerConfig) -> int:
        # The largest message must fit.
        return max(part(limit), min(limit, one.max_message_bytes))

    def of_model(one: ServerConfig) -> ServerConfig:
        return replace(
            one,
            max_queue_size=part(one.max_queue_size),
            max_queue_bytes=part_of_bytes(one.max_queue_bytes, one),
            client_max_requests=part(one.client_max_requests),
            client_max_rows=part(one.client_max_rows),
            client_max_bytes=part_of_bytes(one.client_max_bytes, one),
            client_rate=one.client_rate / processes,
            max_sequences=part(one.max_sequences),
            max_state_bytes=part(one.max_state_bytes),
        )

    options = {
        name: {key: getattr(of_model(config.for_model(name)), key) for key in given}
        for name, given in config.model_options.items()
    }
    return replace(
        of_model(config),
        model_options=options,
        max_connections=part(config.max_connections),
        max_connection_age=config.max_connection_age or CONNECTION_SECONDS,
        max_calls=part(config.max_calls),
        # None is the default of the transport, which is high enough for each process.
        max_streams=None if config.max_streams is None else part(config.max_streams),
        max_unsent_bytes=part(config.max_unsent_bytes),
    )
