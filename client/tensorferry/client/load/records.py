"""Records that pass between the command and its load processes. All can be pickled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorferry.client.connection.channel import CallMetadata, Tls
from tensorferry.client.load.histogram import Histogram
from tensorferry.client.load.steps import Arrival, Arrivals


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how calls reach it.

    `timeout` is the deadline of each request, `connect_timeout` the time for a connection, in seconds.
    """

    address: str
    tls: bool | Tls = False
    metadata: CallMetadata = ()
    timeout: float = 10.0
    stream: bool = False
    connect_timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class Part:
    """What one process does in a step. Times are in seconds.

    In a closed loop it has `in_flight` requests in flight. In an open loop it sends part number
    `part` of `parts`: of `rate` per second, or of the arrivals in `trace`.
    """

    connections: int
    warmup: float
    duration: float
    rows: int
    part: int
    parts: int
    in_flight: int = 0
    rate: float = 0.0
    arrivals: Arrivals = "poisson"
    seed: int = 1
    trace: tuple[Arrival, ...] = ()


@dataclass(frozen=True, slots=True)
class Tally:
    """What one process, or several, measured in an interval of `seconds`.

    The last report of a step has no seconds: it has the answers of an open loop that came after
    the end. `latencies` and `lags` have the buckets of `Histogram`. `failures` has number and
    first message by code. `cpu` has the processor seconds that the calls cost each process, and
    `waited` the seconds in which its threads were ready to run and had no core.
    """

    seconds: float
    latencies: Mapping[int, int] = field(default_factory=dict)
    total: float = 0.0
    least: float = math.inf
    most: float = 0.0
    rows: int = 0
    lags: Mapping[int, int] = field(default_factory=dict)
    failures: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    cpu: tuple[float, ...] = ()
    waited: tuple[float, ...] = ()

    def histogram(self) -> Histogram:
        """Return the latencies."""
        return Histogram.of(self.latencies, self.total, self.least, self.most)


@dataclass(frozen=True, slots=True)
class Report:
    """Tally of one process: `interval` counts from 0; the last is `final`."""

    interval: int
    tally: Tally
    final: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Failure of a load process, such as a connection that was not made in time."""

    message: str
