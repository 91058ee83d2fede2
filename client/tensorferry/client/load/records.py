"""Records that pass between the command and its load processes. All can be pickled."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tensorferry.client.connection.channel import CallMetadata, Tls
from tensorferry.client.load.steps import Arrival, Step

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
    `least_connections` is of all processes together: as many reach every process of the server.
    """

    warmup: float = 1.0
    duration: float = 5.0
    requests: int | None = None
    rows: int = 1
    processes: int = 1
    connections: int | None = None
    least_connections: int = 1
    arrivals: Literal["poisson", "constant"] = "poisson"
    seed: int = 1
    trace: tuple[Arrival, ...] = ()

    def parts(self, step: Step) -> list[Part]:
        """Return the parts of the processes that take part in a step."""
        parts = min(self.processes, step.concurrency or self.processes)
        return [Part(self, step, part, parts) for part in range(parts)]


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
        return self._share(self.step.concurrency or 0)

    @property
    def requests(self) -> int | None:
        """Requests to send; None for as many as the time allows."""
        return self.plan.requests and self._share(self.plan.requests)

    @property
    def connections(self) -> int:
        """The number of connections."""
        least = -(-self.plan.least_connections // self.parts)
        return self.plan.connections or max(least, -(-self.in_flight // _IN_FLIGHT_ON_A_CONNECTION))

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the arrivals of an open loop. Those of all parts together have the rate of the step.

        Their distances are constant, or random and independent of each other.
        """
        plan, rate, parts = self.plan, self.step.rate, self.parts
        if rate is None:
            yield from itertools.islice(plan.trace, self.part, None, parts)
            return
        # The sum of independent Poisson processes is a Poisson process of the sum of their rates.
        chance = random.Random(plan.seed * parts + self.part)
        at = 0.0
        for number in itertools.islice(itertools.count(), self.requests):
            at += chance.expovariate(rate / parts)
            yield Arrival(
                (self.part + parts * number) / rate if plan.arrivals == "constant" else at, plan.rows
            )

    def _share(self, total: int) -> int:
        # The first parts have the remainder.
        return total // self.parts + (self.part < total % self.parts)


@dataclass(slots=True)
class Tally:
    """Measurements of one process in an interval of `seconds`: what ended in it.

    The last tally of a step has no seconds: it has what ended after the measurement. `arrived` is the
    number of answers that came within the measurement, of whatever requests, and `rows` theirs. `cpu` is
    the processor time that the calls cost, and `waited` the time in which the threads were ready to run and
    had no core.
    """

    latencies: list[float] = field(default_factory=list)
    arrived: int = 0
    rows: int = 0
    # By how much requests were sent after the intended time; only in an open loop.
    lags: list[float] = field(default_factory=list)
    # Number and first message by code.
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    seconds: float = 0.0
    cpu: float = 0.0
    waited: float = 0.0


class LoadError(OSError):
    """A load process failed; the message says how."""
