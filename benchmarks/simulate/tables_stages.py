"""Table about pipelines of two stages: what deadlines that keep the time of later stages gain."""

from __future__ import annotations

from measure import Job, Results
from scenarios import TWO_STAGES, Scenario
from stages import STAGE_POLICIES
from tables import Size, Table, markdown, percent, spread

STAGE_LOADS = (0.6, 0.8, 1.0, 1.2, 2.0)


class Stages(Table):
    """Pipelines of two stages under Poisson and bursty arrivals."""

    title = (
        "Pipelines of two stages, the second 4 + 0.1b ms to 32 rows: goodput@99 % / offline; then on-time throughput / "
        "offline (late %) at loads"
    )

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self._rows: list[tuple[Scenario, str, list[Job], list[list[Job]]]] = []
        for scenario in TWO_STAGES:
            for name in STAGE_POLICIES:
                at_loads = [self.cell(scenario, name, load) for load in STAGE_LOADS]
                self._rows.append((scenario, name, self.cell(scenario, name), at_loads))

    def text(self, results: Results) -> str:
        """Return the table."""
        rows = []
        for scenario, name, search, loads in self._rows:
            row = [f"{scenario.name}, {scenario.kind}", name, spread(results.goodputs(search))]
            for cell in loads:
                got = results.summary(cell)
                row.append(f"{got.goodput / scenario.capacity:.3f} ({percent(got.late)})")
            rows.append(row)
        return markdown(["stages", "policy", "goodput@99 %", *(f"{load:g}x" for load in STAGE_LOADS)], rows)
