"""Simulate the shipping queue, its peers and the clairvoyant optimum; print tables in markdown.

    python benchmarks/simulate/run.py [--quick] [--plots DIR] [--page FILE]

The same arguments print the same tables on any machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from measure import Results
from scenarios import STUDY
from tables import LOADS, Beyond, Goodput, Loads, Overload, Rough, Size, Table
from tables_classes import Classes, Shares
from tables_curves import Curves
from tables_devices import Pipelines
from tables_stages import Stages

FULL = Size(seeds=(1, 2, 3, 4), poisson=12_000, mmpp=24_000, searches=9)
QUICK = Size(seeds=(1,), poisson=4_000, mmpp=8_000, searches=7, loads=(0.5, 0.95))
# Between the tables' loads, for the plots' lines.
PLOT_LOADS = tuple(sorted({*LOADS, 0.35, 0.65, 0.7, 0.9, 1.0, 1.5}))


def replace_table(page: Path, name: str, text: str) -> None:
    """Replace the table of this name in the page, if the page has marks for it."""
    before, begin, rest = page.read_text().partition(f"<!-- `make simulate` writes {name} -->")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if begin and end:
        page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer arrivals and one seed: about a minute")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="also write SVG plots there (needs matplotlib)"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="also replace the tables that are marked in this page"
    )
    parser.add_argument(
        "--only", metavar="TABLE", help="simulate this table only, by its class, such as Stages"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    if options.plots:
        size = replace(size, loads=tuple(sorted({*size.loads, *PLOT_LOADS})))

    start = time.monotonic()
    results = Results(options.processes)
    loads = [Loads(scenario, size) for scenario in STUDY]
    overload = Overload(size)
    print(
        f"Seeds {', '.join(map(str, size.seeds))}; {size.poisson} Poisson and {size.mmpp} MMPP arrivals a trace."
    )
    pipelines = Pipelines(size)
    about: list[Table] = [Curves(size), pipelines, Stages(size), Classes(size), Shares(size)]
    tables: list[Table] = [Goodput(size), overload, Rough(size), Beyond(size), *about, *loads]
    if options.only:
        tables = [table for table in tables if type(table).__name__ == options.only]
    for table in tables:
        results.run(table.jobs())
        print(f"\n## {table.title}\n\n{table.text(results)}", flush=True)
        if options.page:
            replace_table(options.page, type(table).__name__, table.text(results))
        print(f"{time.monotonic() - start:.0f} s: {table.title}", file=sys.stderr)
    if options.plots and not options.only:
        import plots  # needs the folder above on the path, and matplotlib

        for path in plots.write(options.plots, loads, overload, pipelines, results):
            print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
