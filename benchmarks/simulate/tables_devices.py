"""The tables about devices: the host's part hidden behind the device's, and devices that are not equally fast."""

from __future__ import annotations

from dataclasses import replace

from measure import BLIND, SERIAL, Job, NoiseKind, Results
from policies import FourEager, NexusStyle, Peer, TwoEager
from scenarios import COMPLETING, CPU, GPU, PIPELINE, UNEQUAL, Scenario
from shipping import Shipping
from tables import Size, markdown, spread

PIPELINE_LOADS = (0.2, 0.5, 0.8, 0.95)
UNEQUAL_LOADS = (0.8, 1.2, 2.0)
NOISES: dict[NoiseKind, str] = {"study": "3 %", "rough": "10 %"}


class Pipelines:
    """What becomes of the host's part of a batch, without and with a second batch in flight."""

    title = (
        "Pipelining, Poisson, 25 ms: goodput@99 % / offline; at loads mean / p99 ms, mean batch, in time %; at 0.8 "
        "the device's share of time lost though requests waited, and ms that a prepared batch waited for it"
    )
    policies = (Peer.name, TwoEager.name, FourEager.name, SERIAL, BLIND, Shipping.name)
    scenarios = (PIPELINE, COMPLETING)

    def __init__(self, size: Size) -> None:
        self._rows: list[tuple[Scenario, NoiseKind, str, list[Job]]] = []
        self.cells: dict[tuple[Scenario, NoiseKind, str, float], list[Job]] = {}
        for scenario in self.scenarios:
            for noise in NOISES:
                for name in self.policies:
                    self._rows.append((scenario, noise, name, size.jobs(scenario, name, noise=noise)))
                    for load in {*PIPELINE_LOADS, *(size.loads if noise == "study" else ())}:
                        jobs = size.jobs(scenario, name, load, noise)
                        self.cells[scenario, noise, name, load] = jobs

    def jobs(self) -> list[Job]:
        """All that it needs."""
        searches = [job for *_, search in self._rows for job in search]
        return searches + [job for cell in self.cells.values() for job in cell]

    def text(self, results: Results) -> str:
        """The table."""
        rows = []
        for scenario, noise, name, search in self._rows:
            row = [scenario.name, NOISES[noise], name, spread(results.goodputs(search))]
            for load in PIPELINE_LOADS:
                got = results.summary(self.cells[scenario, noise, name, load])
                times = f"{1e3 * got.mean:.1f} / {1e3 * got.p99:.1f}"
                row.append(f"{times}, {got.mean_batch:.0f}, {100 * got.in_time:.1f}")
            got = results.summary(self.cells[scenario, noise, name, 0.8])
            rows.append([*row, f"{100 * got.idle:.1f} %, {1e3 * got.early:.2f}"])
        header = ["stages", "noise", "policy", "goodput@99 %", *(f"{load:g}" for load in PIPELINE_LOADS)]
        return markdown([*header, "lost, early"], rows)


class Unequal:
    """One or two devices, and another that is three times slower: what it adds, and what it spoils."""

    title = (
        "Fast devices and a slow one, Poisson: on-time throughput / capacity of the fast (late %); "
        "loads are shares of that capacity, too"
    )
    # What they are called, and how many times as long a batch takes on each.
    devices = (
        ("1 fast", (1.0,)),
        ("1 fast, 1 slow", (1.0, 3.0)),
        ("1 slow, 1 fast", (3.0, 1.0)),
        ("2 fast", (1.0, 1.0)),
        ("2 fast, 1 slow", UNEQUAL),
        ("1 slow, 2 fast", UNEQUAL[::-1]),
    )
    policies: tuple[str, ...] = (Peer.name, NexusStyle.name, Shipping.name)
    scenarios = (GPU, CPU)

    def __init__(self, size: Size) -> None:
        self._rows: list[tuple[Scenario, str, str, str, float, list[list[Job]]]] = []
        for device in self.scenarios:
            for patience in (1, 4):
                for words, slowness in self.devices:
                    timeouts = (device.tightest * patience,)
                    scenario = replace(device, slowness=slowness, timeouts=timeouts)
                    fast = device.capacity * slowness.count(1.0)
                    share = fast / scenario.capacity
                    for name in self.policies:
                        cells = [size.jobs(scenario, name, load * share) for load in UNEQUAL_LOADS]
                        self._rows.append((scenario, device.name, words, name, fast, cells))

    def jobs(self) -> list[Job]:
        """All that it needs."""
        return [job for *_, cells in self._rows for cell in cells for job in cell]

    def text(self, results: Results) -> str:
        """The table."""
        rows = []
        for scenario, device, words, name, fast, cells in self._rows:
            row = [f"{device}, {1e3 * scenario.tightest:.0f} ms", words, name]
            for cell in cells:
                got = results.summary(cell)
                row.append(f"{got.goodput / fast:.3f} ({100 * got.late:.2f})")
            rows.append(row)
        return markdown(["device, timeout", "devices", "policy", *(f"{x:g}x" for x in UNEQUAL_LOADS)], rows)


class UnequalPipelines(Unequal):
    """The same where the host has a part in each batch: with one batch in flight on each device, and with two."""

    title = (
        "Two batches in flight on fast devices and a slow one, Poisson: on-time throughput / capacity of the fast "
        "(late %); loads are shares of that capacity, too"
    )
    policies = (SERIAL, Shipping.name)
    scenarios = (PIPELINE, COMPLETING)
