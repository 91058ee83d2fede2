"""Settings of the supervisor, and the functions of the system that it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensorferry.server.processes.child import Child
from tensorferry.server.processes.slot import ServerSlot


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorSettings:
    """The address, the number of server processes, the times of a drain, and the module of a process.

    `metrics_fd` is the listening socket of the metrics, which every process inherits; None without metrics. `gpus` has the
    visible GPUs of each process, by their numbers; empty if all see the same.
    """

    host: str
    port: int
    processes: int
    drain_seconds: float
    drain_delay: float = 0.0
    metrics_fd: int | None = None
    gpus: tuple[str, ...] = ()
    module: str = "tensorferry.server.processes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the supervisor uses of the system; tests pass stand-ins.

    `launch` starts a child (OSError if it cannot). `print_error` prints a line on stderr.
    """

    clock: Callable[[], float]
    launch: Callable[[ServerSlot], Child]
    print_error: Callable[[str], None]
