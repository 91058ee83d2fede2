"""Tables in the study's form. Each lists its jobs, so that all can run at once, and writes markdown."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from measure import OPTIMUM, Job, NoiseKind, Results
from policies import PEERS, DropExpired, NexusByDeadline, NexusStyle, Peer
from scenarios import BEYOND, CPU, GPU, STUDY, Scenario
from shipping import Shipping

LOADS = (0.2, 0.5, 0.8, 0.95, 1.2)
OVERLOADS = (1.2, 2.0, 5.0)
ROUGH_LOADS = (0.6, 0.7, 0.8)
BEYOND_LOADS = (0.8, 1.2, 2.0)

ALL = (OPTIMUM, *(peer.name for peer in PEERS), Shipping.name)


@dataclass(frozen=True, slots=True)
class Size:
    """The amount of simulation for each number of a table."""

    seeds: tuple[int, ...]
    poisson: int
    mmpp: int
    searches: int
    loads: tuple[float, ...] = LOADS

    def jobs(
        self, scenario: Scenario, policy: str, load: float | None = None, noise: NoiseKind = "study"
    ) -> list[Job]:
        """Return a job for each seed; without a load, the search for goodput@99 %.

        A trace above capacity lasts as long as one at capacity; otherwise its end would weigh too much.
        """
        count = round((self.poisson if scenario.kind == "Poisson" else self.mmpp) * max(1.0, load or 0))
        searches = self.searches if load is None else 0
        return [Job(scenario, policy, seed, count, load, noise, searches) for seed in self.seeds]


class Table(ABC):
    """A table of results, whose numbers are jobs."""

    title: str

    def __init__(self, size: Size) -> None:
        self._size = size
        self._jobs: list[Job] = []

    def cell(
        self, scenario: Scenario, policy: str, load: float | None = None, noise: NoiseKind = "study"
    ) -> list[Job]:
        """Add the jobs of a number of the table, and return them."""
        made = self._size.jobs(scenario, policy, load, noise)
        self._jobs += made
        return made

    def jobs(self) -> list[Job]:
        """Return the jobs of the table."""
        return self._jobs

    @abstractmethod
    def text(self, results: Results) -> str:
        """Return the table in markdown, once its jobs have run."""


class Goodput(Table):
    """Goodput@99 %: the highest load with 99 % of all requests in time, also as a share of the optimum."""

    title = "Goodput@99 % / offline rate, mean ± sd over the seeds (share of the clairvoyant optimum)"

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self._cells: dict[str, list[list[Job]]] = {
            name: [self.cell(scenario, name) for scenario in STUDY] for name in ALL
        }
        self._cells[f"{Shipping.name}, no noise"] = [
            self.cell(scenario, Shipping.name, noise="none") for scenario in STUDY
        ]

    def text(self, results: Results) -> str:
        """Return the table."""
        optimum = [results.goodputs(cell) for cell in self._cells[OPTIMUM]]
        rows = []
        for name, cells in self._cells.items():
            row = [name]
            for cell, best in zip(cells, optimum, strict=True):
                found = results.goodputs(cell)
                share = statistics.mean(a / b for a, b in zip(found, best, strict=True))
                row.append(f"{spread(found)} ({share:.1%})")
            rows.append(row)
        return markdown(["policy", *(f"{s.name} {s.kind}" for s in STUDY)], rows)


class Loads(Table):
    """Load tables: every policy on the same traces, from low load to overload."""

    def __init__(self, scenario: Scenario, size: Size) -> None:
        super().__init__(size)
        self.scenario = scenario
        timeout = scenario.tightest
        self.title = (
            f"{scenario.name}, {scenario.kind}: {scenario.cost.fixed * 1e3:g} + {scenario.cost.per_row * 1e3:g}b ms, "
            f"batches to {scenario.max_batch_size}, timeout {timeout * 1e3:g} ms, offline {scenario.capacity:.0f}/s, "
            f"window {scenario.window * 1e3:g} ms"
        )
        self.cells = {(load, name): self.cell(scenario, name, load) for load in size.loads for name in ALL}

    def text(self, results: Results) -> str:
        """Return the table."""
        rows = []
        for (load, name), cell in self.cells.items():
            if load not in LOADS:
                continue
            got = results.summary(cell)
            times = [f"{1e3 * x:.1f}" for x in (got.mean, got.p50, got.p99)]
            shares = [f"{100 * x:.1f}" for x in (got.late, got.dropped)]
            good = f"{got.goodput / self.scenario.capacity:.3f}"
            row = [f"{load:.2f}", name, f"{100 * got.in_time:.1f}", good]
            rows.append([*row, *times, f"{got.mean_batch:.1f}", *shares])
        header = "load | policy | in time % | goodput/offline | mean ms | p50 | p99 | mean batch | late % | dropped %"
        return markdown(header.split(" | "), rows)


class Overload(Table):
    """Overload: answers in time, wasted work, and the time to a drop."""

    title = "Overload, Poisson: on-time throughput / offline rate, late %, mean ms to a drop"
    policies = (OPTIMUM, Peer.name, DropExpired.name, "BentoML-style", NexusStyle.name, Shipping.name)

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.cells = {
            (device.name, name, load): self.cell(device, name, load)
            for device in (GPU, CPU)
            for name in self.policies
            for load in OVERLOADS
        }

    def text(self, results: Results) -> str:
        """Return the table."""
        rows = []
        for device in (GPU, CPU):
            for name in self.policies:
                row = [device.name, name]
                for load in OVERLOADS:
                    got = results.summary(self.cells[device.name, name, load])
                    good = f"{got.goodput / device.capacity:.3f}"
                    row.append(f"{good}, {percent(got.late)}, {number(1e3 * got.time_to_drop)}")
                rows.append(row)
        return markdown(["device", "policy", *(f"{load:g}x" for load in OVERLOADS)], rows)


class Rough(Table):
    """Noise three times as strong and five times as many stalls."""

    title = "GPU, Poisson, rough noise (10 % lognormal, 1 % of batches take twice as long): in time %, late %"
    policies = (Peer.name, "BentoML-style", NexusStyle.name, Shipping.name)

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self._cells = {
            (name, load): self.cell(GPU, name, load, "rough")
            for name in self.policies
            for load in ROUGH_LOADS
        }

    def text(self, results: Results) -> str:
        """Return the table."""
        rows = []
        for name in self.policies:
            found = [results.summary(self._cells[name, load]) for load in ROUGH_LOADS]
            rows.append([name, *(f"{percent(got.in_time)}, {percent(got.late)}" for got in found)])
        return markdown(["policy", *(f"{load:g}" for load in ROUGH_LOADS)], rows)


class Beyond(Table):
    """Scenarios beyond the study: mixed timeouts, buckets, staircases, several devices."""

    title = "Beyond the study, Poisson: goodput@99 % / offline; then on-time throughput / offline (late %) at loads"
    peers = (Peer.name, DropExpired.name, "BentoML-style", NexusStyle.name)

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self._rows: list[tuple[Scenario, str, list[Job], list[list[Job]]]] = []
        for scenario in BEYOND:
            names = [OPTIMUM, *self.peers] if scenario.has_optimum else list(self.peers)
            if len(scenario.timeouts) > 1:
                names.append(NexusByDeadline.name)
            for name in (*names, Shipping.name):
                at_loads = [self.cell(scenario, name, load) for load in BEYOND_LOADS]
                self._rows.append((scenario, name, self.cell(scenario, name), at_loads))

    def text(self, results: Results) -> str:
        """Return the table."""
        rows = []
        for scenario, name, search, loads in self._rows:
            row = [scenario.name, name, spread(results.goodputs(search))]
            for cell in loads:
                got = results.summary(cell)
                row.append(f"{got.goodput / scenario.capacity:.3f} ({percent(got.late)})")
            rows.append(row)
        return markdown(["scenario", "policy", "goodput@99 %", *(f"{x:g}x" for x in BEYOND_LOADS)], rows)


def spread(values: Sequence[float]) -> str:
    """Format the mean and, for several values, the standard deviation."""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation}"


def number(value: float) -> str:
    """Format with one decimal; a dash if unknown."""
    return "-" if math.isnan(value) else f"{value:.1f}"


def percent(value: float) -> str:
    """Format a share as percent; a dash if unknown."""
    return "-" if math.isnan(value) else f"{100 * value:.2f} %"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join('' if cell == 'nan' else cell for cell in line)} |" for line in lines)
