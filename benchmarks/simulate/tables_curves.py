"""Table about devices whose time per row rises with the rows, or stops falling: the batch size that pays."""

from __future__ import annotations

from measure import ALWAYS_MAX, BLIND, BLIND_ALWAYS_MAX, OPTIMUM, Job, Results
from policies import PEERS
from scenarios import CURVES, Scenario
from shipping import Shipping
from tables import Size, Table, markdown

CURVE_LOADS = (0.6, 0.9, 1.2)


class Curves(Table):
    """Devices by the time per row of their batches."""

    title = (
        "Batch sizes that pay, Poisson, deadlines of ten single rows: in time %; without deadlines: p50 / p99 in times of "
        "a single row, and the answers a second in % of the best size's rate"
    )

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        with_deadlines = (OPTIMUM, *(peer.name for peer in PEERS), ALWAYS_MAX, Shipping.name)
        self._cells: dict[tuple[Scenario, str, float], list[Job]] = {
            (scenario, name, load): self.cell(scenario, name, load)
            for scenario in CURVES
            for name in (*with_deadlines, BLIND_ALWAYS_MAX, BLIND)
            for load in CURVE_LOADS
        }

    def text(self, results: Results) -> str:
        """Return the table."""
        rows: dict[tuple[str, str], list[str]] = {}
        for (scenario, name, _), jobs in self._cells.items():
            got, alone = results.summary(jobs), scenario.cost(1)
            text = f"{100 * got.in_time:.1f}"
            if name in (BLIND_ALWAYS_MAX, BLIND):
                rate = got.throughput / scenario.capacity
                text = f"{got.p50 / alone:.1f} / {got.p99 / alone:.1f}, {100 * rate:.1f}"
            rows.setdefault((scenario.name, name), []).append(text)
        header = ["device", "policy", *(f"load {load:g}" for load in CURVE_LOADS)]
        return markdown(header, [[*names, *cells] for names, cells in rows.items()])
