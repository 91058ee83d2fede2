"""Tables about priority classes: their answers in an overload, and their shares of the device."""

from __future__ import annotations

from measure import WEIGHTS, Job, Results, weighted
from policies import StrictPriority
from scenarios import CPU, GPU, Scenario, two_classes
from shipping import Shipping
from summary import Summary
from tables import Size, Table, markdown

CLASS_LOADS = (0.8, 1.2, 2.0)
SATURATION = 2.0


class Classes(Table):
    """Two classes with deadlines, from below capacity to far above it."""

    title = (
        "Two classes with deadlines, Poisson: in time % of the higher and of the lower class, on-time throughput / "
        "offline rate of both; and mean / p99 ms of the higher class's answers"
    )
    policies = (Shipping.name, StrictPriority.name, weighted(8, 1), weighted(1, 1))

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self._rows: list[tuple[Scenario, str, list[list[Job]]]] = []
        for device in (GPU, CPU):
            for own_buckets in (False, True):
                for high in (0.2, 0.5):
                    scenario = two_classes(device, high, deadlines=True, own_buckets=own_buckets)
                    for name in self.policies:
                        cells = [self.cell(scenario, name, load) for load in CLASS_LOADS]
                        self._rows.append((scenario, name, cells))

    def text(self, results: Results) -> str:
        """Return the table."""
        rows = []
        for scenario, name, cells in self._rows:
            row = [scenario.name, _without(name)]
            for cell in cells:
                got = results.summary(cell)
                high, low = got.classes
                shares = f"{100 * high.in_time:.1f}, {100 * low.in_time:.1f}, {got.goodput / scenario.capacity:.3f}"
                row.append(f"{shares}; {_times(high)}")
            rows.append(row)
        return markdown(["scenario", "policy", *(f"{load:g}x" for load in CLASS_LOADS)], rows)


class Shares(Table):
    """Two backlogged classes without deadlines: their rows compared with their weights."""

    title = (
        f"Two classes without deadlines, half of the requests in each, {SATURATION:g}x: answers / offline rate of the "
        "higher and of the lower class while requests arrive, of both; the lower's part in that; mean ms of each"
    )
    policies = (*Classes.policies[:2], *(weighted(*weights) for weights in WEIGHTS))

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self._rows: list[tuple[Scenario, str, list[Job]]] = []
        for device in (GPU, CPU):
            for own_buckets in (False, True):
                scenario = two_classes(device, 0.5, deadlines=False, own_buckets=own_buckets)
                for name in self.policies:
                    self._rows.append((scenario, name, self.cell(scenario, name, SATURATION)))

    def text(self, results: Results) -> str:
        """Return the table."""
        fair = {weighted(*weights): weights[1] / sum(weights) for weights in WEIGHTS}
        rows = []
        for scenario, name, cell in self._rows:
            got = results.summary(cell)
            parts = [one.throughput / scenario.capacity for one in (*got.classes, got)]
            part = f"{100 * parts[1] / parts[2]:.1f} %"
            if name in fair:
                part += f" (by weight {100 * fair[name]:.1f})"
            means = " / ".join(f"{1e3 * one.mean:.0f}" for one in got.classes)
            rows.append([scenario.name, _without(name), *(f"{x:.3f}" for x in parts), part, means])
        return markdown(["scenario", "policy", "higher", "lower", "both", "lower's part", "mean ms"], rows)


def _without(name: str) -> str:
    return f"{name}, no classes" if name == Shipping.name else name


def _times(got: Summary) -> str:
    return f"{1e3 * got.mean:.1f} / {1e3 * got.p99:.1f}"
