"""Load of a running server by the load generator in C: as much as it serves, or Poisson arrivals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu.workloads import SAMPLES, Workload
from serving import load as generator
from serving.encodings import grpc_frame

_CONNECTIONS = 4
_WARM_UP_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run: answers per second, latencies in seconds, the number of errors, and the share of its core
    that the load generator used. `target` is the rate that was asked for, 0 for as much as possible.
    """

    rate: float
    target: float
    p50: float
    p99: float
    errors: int
    busiest: float

    def met(self, bound: float) -> bool:
        """Whether the 99th percentile is within the bound, and every request was answered."""
        return self.p99 <= bound and not self.errors


@dataclass(frozen=True, slots=True)
class Load:
    """The load generator, its core, and the requests that it sends to a server in turn."""

    program: Path
    core: int
    port: int
    body: Path
    least_bytes: int

    @classmethod
    def of(cls, program: Path, core: int, address: str, workload: Workload, folder: Path) -> Load:
        """Write the requests into a folder."""
        body = folder / f"{workload.name}.request"
        body.write_bytes(b"".join(grpc_frame(workload.request(1, number)) for number in range(SAMPLES)))
        return cls(program, core, int(address.rpartition(":")[2]), body, workload.answer_bytes)

    def offline(self, seconds: float, in_flight: int) -> Outcome:
        """Keep `in_flight` requests of one row in flight."""
        shape = generator.Shape("unary", _CONNECTIONS, max(1, in_flight // _CONNECTIONS), 1)
        return self._run(shape, seconds, 0.0)

    def server(self, rate: float, seconds: float) -> Outcome:
        """Send at Poisson arrivals of a rate. Latency counts from the intended time of sending.

        A run ends with an error if the server is too far behind.
        """
        try:
            return self._run(generator.Shape("unary", _CONNECTIONS, 1, 1), seconds, rate)
        except generator.LoadError as error:
            if "does not keep up" not in str(error):
                raise
            return Outcome(0.0, rate, seconds, seconds, 1, 1.0)

    def _run(self, shape: generator.Shape, seconds: float, rate: float) -> Outcome:
        load = generator.Load(
            port=self.port,
            path=generator.UNARY_PATH,
            body=self.body,
            shape=shape,
            seconds=seconds,
            warm_up=_WARM_UP_SECONDS,
            least_bytes=self.least_bytes,
            rate=rate,
        )
        found = generator.run_load(self.program, load, core=self.core)
        return Outcome(
            rate=found.rate,
            target=rate,
            p50=found.p50_ms / 1e3,
            p99=found.p99_ms / 1e3,
            errors=found.errors + found.unanswered,
            busiest=found.cpu_seconds / found.seconds,
        )
