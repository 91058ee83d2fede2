"""Table about pipelining: the host's part of a batch overlaps with the device's."""

from __future__ import annotations

from measure import BLIND, SERIAL, Job, NoiseKind, Results
from policies import FourEager, Peer, TwoEager
from scenarios import COMPLETING, PIPELINE, Scenario
from shipping import Shipping
from tables import Size, Table, markdown, spread

PIPELINE_LOADS = (0.2, 0.5, 0.8, 0.95)
NOISES: dict[NoiseKind, str] = {"study": "3 %", "rough": "10 %"}


class Pipelines(Table):
    """Batches with a host part, without and with a second batch in flight."""

    title = (
        "Pipelining, Poisson, 25 ms: goodput@99 % / offline; at loads mean / p99 ms, mean batch, in time %; at 0.8 "
        "the device's share of time lost though requests waited, and ms that a prepared batch waited for it"
    )
    policies = (Peer.name, TwoEager.name, FourEager.name, SERIAL, BLIND, Shipping.name)
    scenarios = (PIPELINE, COMPLETING)

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self._rows: list[tuple[Scenario, NoiseKind, str, list[Job]]] = []
        self.cells: dict[tuple[Scenario, NoiseKind, str, float], list[Job]] = {}
        for scenario in self.scenarios:
            for noise in NOISES:
                for name in self.policies:
                    self._rows.append((scenario, noise, name, self.cell(scenario, name, noise=noise)))
                    for load in {*PIPELINE_LOADS, *(size.loads if noise == "study" else ())}:
                        jobs = self.cell(scenario, name, load, noise)
                        self.cells[scenario, noise, name, load] = jobs

    def text(self, results: Results) -> str:
        """Return the table."""
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
