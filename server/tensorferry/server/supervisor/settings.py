"""Settings of the supervisor, and the functions of the system that it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.server.supervisor.child import Child
from tensorferry.server.supervisor.supervised_process import SupervisedProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorSettings:
    """The address, the number of front-ends, the times of a drain, and the modules of the children.

    `metrics_fd` is the listening socket of the metrics, which every engine inherits; None without metrics.
    """

    host: str
    port: int
    front_ends: int
    drain_seconds: float
    drain_delay: float = 0.0
    metrics_fd: int | None = None
    engine_module: str = "tensorferry.server.engine"
    front_end_module: str = "tensorferry.server.front_end"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the supervisor uses of the system; tests pass stand-ins.

    `launch` starts a child (OSError if it cannot). `create_link` returns the three descriptors of a new link.
    `print_ready` gets the address, and the fields of the engine's `ready` and of a front-end's `listening`. `print_error`
    prints a line on stderr.
    """

    clock: Callable[[], float]
    launch: Callable[[SupervisedProcess], Child]
    create_link: Callable[[], Sequence[int]]
    print_ready: Callable[[str, dict[str, Any], dict[str, Any]], None]
    print_error: Callable[[str], None]
