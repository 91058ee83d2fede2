"""Records that pass between the command and its load processes. All can be pickled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tensorferry.client.connection.channel import CallMetadata, Tls
from tensorferry.client.load.histogram import Histogram
from tensorferry.client.load.steps import Arrival, Arrivals, Step, arrivals_of, share

# Requests in flight on one connection, unless the number of connections is given. Proxies and
# servers often allow 100 streams on a connection, and gRPC delays calls above that.
_IN_FLIGHT_ON_A_CONNECTION = 64


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
class Plan:
    """Options of all steps. Times are in seconds; `connections` is of each process, None for a default.

    A step ends after `duration`, or sooner when all `requests` have ended; None is no bound.
    """

    warmup: float = 1.0
    duration: float = 5.0
    requests: int | None = None
    rows: int = 1
    processes: int = 1
    connections: int | None = None
    arrivals: Arrivals = "poisson"
    seed: int = 1
    trace: tuple[Arrival, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Work of one process in a step: number `part` of `parts`."""

    plan: Plan
    step: Step
    part: int
    parts: int

    @property
    def in_flight(self) -> int:
        """Requests in flight in a closed loop; 0 in an open one."""
        return share(self.step.concurrency or 0, self.parts, self.part)

    @property
    def requests(self) -> int | None:
        """Requests to send; None for as many as the time allows."""
        return self.plan.requests and share(self.plan.requests, self.parts, self.part)

    @property
    def connections(self) -> int:
        """The number of connections."""
        return self.plan.connections or max(1, -(-self.in_flight // _IN_FLIGHT_ON_A_CONNECTION))

    def arrivals(self) -> Iterator[Arrival]:
        """Return the arrivals of an open loop."""
        plan = self.plan
        if self.step.rate is None:
            return itertools.islice(plan.trace, self.part, None, self.parts)
        endless = arrivals_of(plan.arrivals, self.step.rate, plan.rows, self.parts, self.part, plan.seed)
        return itertools.islice(endless, self.requests)


@dataclass(frozen=True, slots=True)
class Tally:
    """Measurements of one process in an interval of `seconds`.

    The last tally of a step has no seconds: it has the answers of an open loop that came after
    the end. `failures` has number and first message by code. `cpu` is the processor time that the
    calls cost, and `waited` the time in which the threads were ready to run and had no core.
    """

    seconds: float
    latencies: Histogram
    rows: int
    lags: Histogram
    failures: Mapping[str, tuple[int, str]]
    cpu: float
    waited: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Failure of a load process, such as a connection that was not made in time."""

    message: str
