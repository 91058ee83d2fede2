"""Results of a load test: what each step measured, and where the client was the limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tensorferry.client.load.histogram import Histogram
from tensorferry.client.load.records import Tally
from tensorferry.client.load.server_statistics import ServerSide
from tensorferry.client.load.steps import Step

# Share of a core above which a load process is the limit, and what one late send may be, in
# seconds and as a share of the median latency.
_BUSY_CORES = 0.85
_LAG_SECONDS, _LAG_SHARE = 0.001, 0.1
# Share of the median latency that may be the client's own work.
_OWN_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Interval:
    """One interval of a step, of about a second: for the spread of the results, and for plots."""

    seconds: float
    answered: int
    failed: int
    p50_seconds: float | None
    p99_seconds: float | None


@dataclass(slots=True)
class StepResult:
    """Sums of the measurements of all processes in one step. Times are in seconds. Not thread-safe.

    `errors` has number and first message by code, `cpu_seconds` and `waited_seconds` the sums by process. `arrived` and
    `rows` are of the answers that came within the measurement, as in `Tally`.
    """

    step: Step
    latencies: Histogram = field(default_factory=Histogram)
    lags: Histogram = field(default_factory=Histogram)
    arrived: int = 0
    rows: int = 0
    seconds: float = 0.0
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    cpu_seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    waited_seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    intervals: list[Interval] = field(default_factory=list)
    server: ServerSide | None = None

    def add(self, tallies: Sequence[Tally]) -> Interval | None:
        """Add the tallies of all processes, in their order, for one interval; return it, None for the last tallies."""
        latencies = Histogram()
        failed = 0
        for part, tally in enumerate(tallies):
            latencies.add(tally.latencies)
            self.latencies.add(tally.latencies)
            self.lags.add(tally.lags)
            self.arrived += tally.arrived
            self.rows += tally.rows
            self.cpu_seconds[part] += tally.cpu
            self.waited_seconds[part] += tally.waited
            for code, (count, message) in tally.failures.items():
                failed += count
                known, first = self.errors.get(code, (0, message))
                self.errors[code] = (known + count, first)
        seconds = max(tally.seconds for tally in tallies)
        self.seconds += seconds
        if not seconds:
            return None
        middle, high = latencies.percentile(0.5), latencies.percentile(0.99)
        answered = sum(tally.arrived for tally in tallies)
        self.intervals.append(Interval(seconds, answered, failed, middle, high))
        return self.intervals[-1]

    @property
    def answered(self) -> int:
        """The number of answers."""
        return self.latencies.count

    @property
    def failed(self) -> int:
        """The number of failures."""
        return sum(count for count, _ in self.errors.values())

    @property
    def requests_per_second(self) -> float:
        """Answers per second. Those that came after the measurement are not among them."""
        return self.arrived / self.seconds if self.seconds else 0.0

    @property
    def rows_per_second(self) -> float:
        """Rows of these answers per second."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def cpu(self) -> list[float]:
        """The cores that each process used."""
        return [used / self.seconds for used in self.cpu_seconds.values()]

    @property
    def waited(self) -> list[float]:
        """The share of the time in which each process waited for a core."""
        return [waited / self.seconds for waited in self.waited_seconds.values()]

    @property
    def own_seconds(self) -> float | None:
        """Processor time of the client for each call; None without calls."""
        calls = self.answered + self.failed
        return sum(self.cpu_seconds.values()) / calls if calls else None

    @property
    def warnings(self) -> Sequence[str]:
        """A sentence for each sign that figures are those of the client, not of the server."""
        found = []
        median, late = self.latencies.percentile(0.5) or 0.0, self.lags.percentile(0.99) or 0.0
        busiest, own = max(self.cpu, default=0.0), self.own_seconds or 0.0
        used, wait = max(zip(self.cpu, self.waited, strict=True), key=sum, default=(0.0, 0.0))
        if busiest >= _BUSY_CORES:
            found.append(
                f"the client is the limit: a load process used {busiest:.0%} of a core; "
                f"use more than --processes {len(self.cpu)}, on a machine with cores to spare"
            )
        elif used + wait >= _BUSY_CORES:
            found.append(
                f"the client is the limit: a load process used {used:.0%} of a core and waited {wait:.0%} of the time for one, "
                "which the server or other programs had; run the client on other cores"
            )
        elif median and own > _OWN_SHARE * median:
            found.append(
                f"the client's own work is in the latencies: about {1e3 * own:.2f} ms of each call, "
                f"so those below {1e3 * own / _OWN_SHARE:.1f} ms are more than a tenth too high"
            )
        if late > max(_LAG_SECONDS, _LAG_SHARE * median):
            found.append(
                f"the client is late: 1 % of the requests were sent {1e3 * late:.1f} ms or more after the intended time, "
                "which their latencies include; use more --processes or a lower --rate"
            )
        return found
