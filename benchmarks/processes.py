"""Gain and cost of server processes: `tensorferry serve --processes 1` beside `--processes 2`.

    python benchmarks/processes.py --load PROGRAM [--quick] [--write PAGE]

Both servers run at the same time, and the load alternates between them in rounds. Servers and load share all cores. Ratios
are within a round, and values are medians of the rounds.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from sections import Section

from serving.load import Shape
from serving.machine import describe
from serving.measure import Bench, Row
from serving.plan import UNARY, Cell
from serving.processes import Cores, Running
from serving.run import cache_folder
from serving.servers import LANE, servers
from serving.workloads import MLP, TINY, Workload, write_models

SECTION = Section("<!-- processes: begin -->", "<!-- processes: end -->")
PROCESSES = (1, 2)
IMAGE = Workload("150 KB", "identity", 37_500, "Identity of 150,000 bytes")
IN_FLIGHT: Mapping[Workload, Sequence[int]] = {TINY: (1, 32, 256), MLP: (32,), IMAGE: (32,)}
# The kernel assigns each connection to a process by a hash.
CONNECTIONS = 16
_WARM_UP = 0.3

# By workload and calls in flight: a row for each number of processes, in each round.
Results = Mapping[tuple[Workload, int], Sequence[Mapping[int, Row]]]


@contextmanager
def started(bench: Bench, workload: Workload, count: int) -> Iterator[Running]:
    """Start a server, and yield it when each of its processes has loaded the model."""
    with bench.started(servers()[LANE], workload, "--processes", str(count)) as (serving, _):
        while " ready on " not in serving.log():
            time.sleep(0.05)
        yield serving


def measure(bench: Bench, serving: Running, workload: Workload, in_flight: int, seconds: float) -> Row:
    """Return the result of one load on a server. SystemExit if a call fails."""
    cell = Cell(workload, UNARY, in_flight, seconds, _WARM_UP)
    connections = min(CONNECTIONS, in_flight)
    load = replace(
        bench.load_of(servers()[LANE], workload, serving.port, cell),
        shape=Shape("unary", connections, in_flight // connections, 1),
    )
    row = bench.measured(serving, load)
    if row["errors"] or row["unanswered"]:
        raise SystemExit(f"{row['errors']} errors; the last: {row['last_message']}")
    return row


def run(bench: Bench, rounds: int, seconds: float) -> Results:
    """Measure everything, and print a line for each load."""
    results: dict[tuple[Workload, int], list[Mapping[int, Row]]] = defaultdict(list)
    for workload, in_flights in IN_FLIGHT.items():
        with ExitStack() as stack:
            running = {count: stack.enter_context(started(bench, workload, count)) for count in PROCESSES}
            for number in range(rounds):
                for in_flight in in_flights:
                    # The order alternates, so that a drift of the machine affects both alike.
                    found = {
                        count: measure(bench, running[count], workload, in_flight, seconds)
                        for count in PROCESSES[:: -1 if number % 2 else 1]
                    }
                    results[workload, in_flight].append(found)
                    print(_line(workload, in_flight, found), flush=True)
    return results


def _line(workload: Workload, in_flight: int, found: Mapping[int, Row]) -> str:
    rates = ", ".join(
        f"{count} process{'es' * (count > 1)} {found[count]['rate']:,.0f} calls/s, p50 {found[count]['p50_ms']:.2f} ms"
        for count in PROCESSES
    )
    return f"{workload.name}, {in_flight} in flight: {rates}"


def page(results: Results, machine: Mapping[str, object], command: str) -> str:
    """Return the section of the page."""
    rows = [row for rounds in results.values() for found in rounds for row in found.values()]
    others = [row["other_cores"] for row in rows]
    versions = machine["versions"]
    assert isinstance(versions, dict)
    lines = [
        f"`{command}`, {datetime.date.today()}, {machine['processor']}, {machine['cores']} cores that servers and load "
        f"share. Other programs used {statistics.median(others):.2f} cores (median), {max(others):.2f} at most; Python "
        f"{machine['python']}, grpcio {versions['grpcio']}, onnxruntime {versions['onnxruntime']}.",
        "",
        "| load | rounds | calls/s, one process | calls/s, ratio | p50 ms, one process | p50, more ms | CPU us a call, one process "
        "| CPU, ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (workload, in_flight), rounds in results.items():
        one, two = ([found[count] for found in rounds] for count in PROCESSES)
        pairs = list(zip(one, two, strict=True))
        cells = (
            f"{workload.name}, {in_flight} in flight",
            str(len(rounds)),
            f"{statistics.median(row['rate'] for row in one):,.0f}",
            _spread([two["rate"] / one["rate"] for one, two in pairs]),
            f"{statistics.median(row['p50_ms'] for row in one):.2f}",
            f"{statistics.median(two['p50_ms'] - one['p50_ms'] for one, two in pairs):+.2f}",
            f"{statistics.median(row['cpu_us_per_answer'] for row in one):.1f}",
            _spread([two["cpu_us_per_answer"] / one["cpu_us_per_answer"] for one, two in pairs]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"


def main() -> None:
    """Measure and print the section, and write it into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=Path, required=True, help="the load generator, built by make")
    parser.add_argument("--quick", action="store_true", help="one short round, for whether it works")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page whose section is replaced")
    arguments = parser.parse_args()
    cache = cache_folder()
    write_models(cache)
    bench = Bench(cache, arguments.load.resolve(), replace(Cores.split(), shared=True))
    rounds, seconds = (1, 0.4) if arguments.quick else (11, 1.0)
    results = run(bench, rounds, seconds)
    text = page(results, describe(cache), "make bench-processes" + (" QUICK=1" if arguments.quick else ""))
    print(text)
    if arguments.write:
        arguments.write.write_text(SECTION.replaced(arguments.write.read_text(), text))


if __name__ == "__main__":
    main()
