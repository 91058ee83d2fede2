"""Plots of the load and overload tables as small SVG files. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from figures import panels, prepare, save
from measure import BLIND, OPTIMUM, Results
from policies import DropExpired, FourEager, NexusStyle, Peer, TwoEager, WindowFromArrival, WindowFromPop
from shipping import Shipping
from summary import Summary
from tables import OVERLOADS, Loads, Overload
from tables_devices import Pipelines

# Only these, because the other lines coincide with one of them.
LINES = {
    OPTIMUM: ("black", ":"), WindowFromPop.name: ("tab:red", "-"),
    WindowFromArrival.name: ("tab:orange", "-"), Peer.name: ("tab:brown", "-"),
    DropExpired.name: ("tab:pink", "--"), "BentoML-style": ("tab:purple", "-"),
    NexusStyle.name: ("tab:green", "-"), Shipping.name: ("tab:blue", "-"),
}  # fmt: skip

# No policy sheds here: they differ only in when a batch is closed.
PIPELINE_LINES = {
    Peer.name: ("tab:brown", "one instance"),
    TwoEager.name: ("tab:orange", TwoEager.name),
    FourEager.name: ("tab:red", FourEager.name),
    BLIND: ("tab:blue", "tensorferry, just in time"),
}


def write(
    folder: Path, loads: list[Loads], overload: Overload, pipelines: Pipelines, results: Results
) -> list[Path]:
    """Write all plots into the folder; return their paths."""
    prepare(folder)
    return [
        _against_load(folder / "goodput.svg", loads, results, "on time / offline rate", _goodput),
        _against_load(folder / "latency.svg", loads, results, "p99 of the answered, ms", _p99),
        _overload(folder / "overload.svg", overload, results),
        _pipeline(folder / "pipeline.svg", pipelines, results),
    ]


def _goodput(got: Summary, table: Loads) -> float:
    return got.goodput / table.scenario.capacity


def _p99(got: Summary, table: Loads) -> float:
    return 1e3 * got.p99


def _against_load(
    path: Path,
    tables: list[Loads],
    results: Results,
    label: str,
    value: Callable[[Summary, Loads], float],
) -> Path:
    figure, axes = panels(len(tables))
    for panel, table in zip(axes, tables, strict=True):
        loads = sorted({load for load, _ in table.cells})
        for name, (color, style) in LINES.items():
            if name == OPTIMUM and value is _p99:
                # The optimum of a count of answers has no latency.
                continue
            points = [value(results.summary(table.cells[load, name]), table) for load in loads]
            panel.plot(loads, points, style, color=color, label=name, linewidth=1.3)
        panel.set_title(f"{table.scenario.name}, {table.scenario.kind}")
        panel.set_xlabel("load / offline rate")
        panel.set_ylim(bottom=0)
        if value is _p99:
            panel.axhline(1e3 * table.scenario.tightest, color="grey", linewidth=0.6)
            panel.set_ylim(0, 3e3 * table.scenario.tightest)
    axes[0].set_ylabel(label)
    return save(figure, axes[0], path)


def _overload(path: Path, table: Overload, results: Results) -> Path:
    figure, axes = panels(2)
    names = [name for name in table.policies if name in LINES]
    width = 0.8 / len(names)
    for panel, device in zip(axes, ("GPU", "CPU"), strict=True):
        for number, name in enumerate(names):
            jobs = [table.cells[device, name, load] for load in OVERLOADS]
            bars = [results.summary(cell).goodput / cell[0].scenario.capacity for cell in jobs]
            places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(OVERLOADS))]
            panel.bar(places, bars, width, color=LINES[name][0], label=name)
        panel.set_xticks(range(len(OVERLOADS)), [f"{load:g}x" for load in OVERLOADS])
        panel.set_title(f"{device}, Poisson, overload")
    axes[0].set_ylabel("on time / offline rate")
    return save(figure, axes[0], path)


def _pipeline(path: Path, table: Pipelines, results: Results) -> Path:
    figure, axes = panels(2)
    for panel, scenario in zip(axes, table.scenarios, strict=True):
        for name, (color, label) in PIPELINE_LINES.items():
            cells = {
                load: jobs
                for (of, noise, policy, load), jobs in table.cells.items()
                if (of, noise, policy) == (scenario, "study", name) and load <= 1
            }
            loads = sorted(cells)
            points = [1e3 * results.summary(cells[load]).mean for load in loads]
            panel.plot(loads, points, color=color, label=label, linewidth=1.3)
        panel.set_title(scenario.name, fontsize=8)
        panel.set_xlabel("load / offline rate")
        panel.set_ylim(0, 2e3 * scenario.tightest)
    axes[0].set_ylabel("mean latency, ms")
    return save(figure, axes[0], path)
