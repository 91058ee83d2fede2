"""Prediction of calls per second on more cores, from the processor time of a call in each process.

    python benchmarks/front_end_scaling.py PAGE PLOT

Reads the processor times in the tables of docs/results/front_ends.md, which front_ends.py has written, and writes the page's
section about more cores, and its plot. The cores are divided as by `--front-ends auto`.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sections import Section

from tensorferry.server.cores import Division, runtime_threads

SECTION = Section("<!-- scaling: begin -->", "<!-- scaling: end -->")
SMALL, IMAGE = "tiny, 256 in flight", "150 KB, 32 in flight"
CORES = (4, 8, 16, 64)
PLOTTED_CORES = (2, 4, 8, 16, 32, 64)
# Processor time of ONNX Runtime for a call, in milliseconds.
MODEL_MS = (0.1, 1.0, 10.0)
_ROW = re.compile(
    r"\| (\d+) \|.*\| (?:([\d,]+)|too noisy) \| [^|]* "
    r"\| first process ([\d.]+)(?:, engine ([\d.]+), front-ends ([\d.]+))? \|"
)
_ENGINE_ALONE = re.compile(r"The engine alone .*?: ([\d.]+) us of processor time a request")


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time of a call, in microseconds: in a server of one process, and in the processes of one with front-ends."""

    one_process: float
    engine: float
    front_end: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Calls per second, and what limits them."""

    rate: float
    limit: str

    def __str__(self) -> str:
        return f"{_rounded(self.rate):,.0f} ({self.limit})"


@dataclass(frozen=True, slots=True)
class Measured:
    """Row of a table: calls per second, None if they were too noisy; processor time of a call in microseconds."""

    front_ends: int
    rate: float | None
    first_process: float
    engine: float
    front_end: float

    @property
    def cores(self) -> float:
        """Cores that the processes used."""
        return (self.rate or 0.0) * (self.engine + self.front_end) / 1e6


def measured(page: str, load: str) -> Sequence[Measured]:
    """Return the rows of a table of the page. ValueError if they are not as expected."""
    table = page.partition(f"\n{load}:\n")[2].lstrip().partition("\n\n")[0]
    rows = []
    for row in map(_ROW.fullmatch, table.splitlines()[2:]):
        if row is None:
            raise ValueError(f"the page has another table of {load}")
        rate = None if row[2] is None else float(row[2].replace(",", ""))
        rows.append(Measured(int(row[1]), rate, float(row[3]), float(row[4] or 0), float(row[5] or 0)))
    if len(rows) < 2 or rows[0].front_ends != 0:
        raise ValueError(f"the page has no complete table of {load}")
    return rows


def costs_of(page: str, load: str) -> Costs:
    """Return the costs in a table of the page; the medians over the numbers of front-ends."""
    one_process, *rows = measured(page, load)
    return Costs(
        one_process.first_process,
        statistics.median(row.engine for row in rows),
        statistics.median(row.front_end for row in rows),
    )


def predicted(costs: Costs, division: Division, model_ms: float) -> Prediction:
    """Return the prediction. On a GPU, `model_ms` is 0: the device is taken to be fast enough."""
    model = 1e3 * model_ms
    if division.front_ends:
        threads = runtime_threads(division.cores, division.front_ends, gpu=division.gpu)
        limits = {
            "front-ends": division.front_ends / costs.front_end,
            "engine": 1 / costs.engine,
            "ONNX Runtime": threads / model if model else math.inf,
        }
    else:
        limits = {
            "one process": 1 / costs.one_process,
            "cores": division.cores / (costs.one_process + model),
        }
    limit = min(limits, key=lambda each: limits[each])
    return Prediction(1e6 * limits[limit], limit)


def section_of(page: str) -> str:
    """Return the section for a page with these measurements."""
    small, image = costs_of(page, SMALL), costs_of(page, IMAGE)
    alone = _ENGINE_ALONE.search(page)
    with_rates = [row for row in measured(page, SMALL)[1:] if row.rate]
    lines = [
        "| processor time of a call, us | one process | engine | front-ends |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {costs.one_process:.1f} | {costs.engine:.1f} | {costs.front_end:.1f} |"
            for name, costs in ((SMALL, small), (IMAGE, image))
        ),
        "",
        "Models on a GPU that is fast enough:",
        "",
        "| cores | front-ends | calls/s, small | calls/s, 150 KB |",
        "|---:|---:|---|---|",
    ]
    for cores in CORES:
        division = Division.automatic(cores, gpu=True)
        rates = [predicted(costs, division, 0.0) for costs in (small, image)]
        lines.append(f"| {cores} | {division.front_ends} | {rates[0]} | {rates[1]} |")
    lines += [
        "",
        "Models on the CPU, small requests, by the processor time of ONNX Runtime for a call:",
        "",
        f"| cores | front-ends | {' | '.join(f'calls/s, {ms:g} ms' for ms in MODEL_MS)} |",
        f"|---:|---:|{'---|' * len(MODEL_MS)}",
    ]
    for cores in CORES:
        division = Division.automatic(cores, gpu=False)
        cells = " | ".join(str(predicted(small, division, ms)) for ms in MODEL_MS)
        lines.append(f"| {cores} | {division.front_ends} | {cells} |")
    if with_rates:
        least, most = (pick(with_rates, key=lambda row: row.cores) for pick in (min, max))
        lines += [
            "",
            f"Where these times were measured, engine and front-ends used {least.cores:.1f} to {most.cores:.1f} cores for "
            f"{_rounded(least.rate or 0):,.0f} to {_rounded(most.rate or 0):,.0f} small calls/s, and the load the rest of the cores.",
        ]
    if alone:
        engine = float(alone[1])
        lines += [
            "",
            f"The engine's {small.engine:.1f} us of a small call were measured on cores that it shared with front-ends and load. "
            f"Alone on a core it took {engine:.1f} us, with which its limit is {_rounded(1e6 / engine):,.0f} calls/s.",
        ]
    return "\n".join(lines)


def _rounded(rate: float) -> float:
    """Return the rate with two digits: the times are not more exact."""
    return round(rate, 1 - math.floor(math.log10(rate)))


def plot(path: Path, page: str) -> None:
    """Write the plot of a page with these measurements."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise SystemExit("the plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("svg")
    # Text stays text, and the same numbers give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tensorferry", "font.size": 9})
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, panel = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    small, image = costs_of(page, SMALL), costs_of(page, IMAGE)
    for label, costs, gpu, ms, style in (
        ("small, GPU", small, True, 0.0, "tab:blue"),
        ("150 KB, GPU", image, True, 0.0, "tab:orange"),
        *(
            (f"small, {ms:g} ms on the CPU", small, False, ms, color)
            for ms, color in zip(MODEL_MS, ("tab:green", "tab:olive", "tab:brown"), strict=True)
        ),
    ):
        rates = [predicted(costs, Division.automatic(cores, gpu=gpu), ms).rate for cores in PLOTTED_CORES]
        panel.plot(PLOTTED_CORES, rates, color=style, label=label, linewidth=1.3, marker=".", markersize=4)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(PLOTTED_CORES, [str(cores) for cores in PLOTTED_CORES])
    panel.set_xlabel("cores of the server")
    panel.set_ylabel("calls/s, predicted")
    panel.grid(visible=True, which="major", linewidth=0.3)
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the section and the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, metavar="PAGE")
    parser.add_argument("plot", type=Path, metavar="PLOT")
    given: Any = parser.parse_args(arguments)
    page = given.page.read_text()
    given.page.write_text(SECTION.replaced(page, section_of(page)))
    plot(given.plot, page)


if __name__ == "__main__":
    main()
