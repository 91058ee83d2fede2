"""A real server under more load than it can serve, from `tensorferry bench`.

    python benchmarks/overload.py [--quick] [--transport threaded]

A server process on one core serves an MLP; the load comes from another. The capacity is measured
(64 callers in a closed loop). Then an open loop offers a share or a multiple of it, as Poisson
arrivals, each with a deadline; then the capacity is measured again, and so on. The result is the
requests answered within their deadline, relative to the mean of the capacity before and after,
because the speed of a shared machine varies.

On one core the transport of every call, refused or answered, takes time from the model: the column
"of core" is the server's processor time relative to elapsed time, below 1 if other processes use the core.
With `--spare-core` the server may use the load's core, too, after its start: its model has one
thread, which keeps one core busy, and calls are read and refused on the other.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import apart_server
import numpy as np
from real_server import PROGRAM, Cores, RealServer, bench, build_mlp, examples, pin, serving

from gpu.cores import cpu_seconds

LOADS = (0.5, 0.8, 1.5, 2.0, 3.0, 5.0, 10.0)
CALLERS = 64
_WARM_UP_SECONDS = 0.5
HEADER = "load | offered answered/s | on time/capacity (min-max) | refused expired  other | answered p50    p99 ms | lag p99 ms | of core"


@dataclass(frozen=True, slots=True)
class Sample:
    """One open loop: its load, its capacity in requests per second, its results, and the server's share of its core."""

    load: float
    capacity: float
    step: dict[str, Any]
    of_core: float

    @property
    def ratio(self) -> float:
        """Requests answered within their deadline, relative to the capacity."""
        return float(self.step["requests_per_second"]) / self.capacity

    def share(self, *codes: str) -> float:
        """Return the share of the requests that ended with these statuses, or with others if none are given."""
        known = codes or ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
        errors = sum(
            error["count"] for error in self.step["errors"] if (error["code"] in known) == bool(codes)
        )
        return float(errors / (self.step["answered"] + self.step["failed"]))


def line(samples: Sequence[Sample]) -> str:
    """Return a line of the table: the medians of the rounds."""
    ratios = [sample.ratio for sample in samples]

    def middle(*path: str) -> float:
        found: list[float] = []
        for sample in samples:
            value: Any = sample.step
            for key in path:
                value = value[key]
            found.append(value or 0.0)
        return median(found)

    def share(*codes: str) -> str:
        return f"{median(sample.share(*codes) for sample in samples):7.1%}"

    offered = median((s.step["answered"] + s.step["failed"]) / s.step["seconds"] for s in samples)
    return (
        f"{samples[0].load:4g} | {offered:7.0f} {middle('requests_per_second'):10.0f} "
        f"| {median(ratios):16.3f} ({min(ratios):.2f}-{max(ratios):.2f}) "
        f"| {share('RESOURCE_EXHAUSTED')} {share('DEADLINE_EXCEEDED')} {share()} "
        f"| {middle('latency_seconds', 'p50') * 1e3:12.0f} {middle('latency_seconds', 'p99') * 1e3:6.0f}    "
        f"| {middle('client', 'lag_p99_seconds') * 1e3:10.1f} | {median(s.of_core for s in samples):7.0%}"
    )


def run(arguments: argparse.Namespace, server: RealServer, rows: Path, core: int | None) -> None:
    """Run all rounds, and print the table."""

    def load(seconds: float, *words: object) -> dict[str, Any]:
        return bench(server.address, rows, core, "--duration", seconds, "--warmup", _WARM_UP_SECONDS, *words)

    def capacity() -> float:
        return float(load(arguments.seconds / 2, "--concurrency", CALLERS)["requests_per_second"])

    # Until the server has learned batch times under load.
    load(1.0, "--concurrency", CALLERS)
    before = capacity()
    # Five full batches, at least 100 ms.
    deadline = arguments.deadline_ms / 1e3 or max(0.1, 5 * arguments.max_batch_size / before)
    print(f"deadline {deadline * 1e3:.0f} ms")
    samples: list[Sample] = []
    for _ in range(arguments.rounds):
        for multiple in arguments.loads:
            used, started = cpu_seconds(server.process.pid), time.perf_counter()
            step = load(arguments.seconds, "--rate", multiple * before, "--timeout", deadline)
            of_core = (cpu_seconds(server.process.pid) - used) / (time.perf_counter() - started)
            after = capacity()
            samples.append(Sample(multiple, (before + after) / 2, step, of_core))
            before = after
    print(
        f"capacity {median(sample.capacity for sample in samples):.0f} requests/s, {CALLERS} callers\n{HEADER}"
    )
    for multiple in arguments.loads:
        print(line([sample for sample in samples if sample.load == multiple]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each open loop (default: 3)")
    parser.add_argument("--deadline-ms", type=float, default=0, help="0: 5 full batches, at least 100 ms")
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--positions", type=int, default=24, help="of a row, which cost as much as rows")
    parser.add_argument(
        "--apart",
        metavar="FIXED,PER_ROW",
        help="a small model on a device of its own, whose batches take so many milliseconds, as on a GPU",
    )
    parser.add_argument(
        "--spare-core", action="store_true", help="the transport need not share the model's core"
    )
    parser.add_argument("--transport", choices=("auto", "lane", "threaded"), default="auto")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="multiples of the capacity")
    parser.add_argument("--quick", action="store_true", help="one short round, about 20 s")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.layers = 1, 0.6, 4
    program: Sequence[str] = PROGRAM
    if arguments.apart:
        os.environ[apart_server.COST] = arguments.apart
        program, arguments.layers, arguments.width, arguments.positions = (apart_server.__file__,), 2, 64, 1
    cores = Cores.split()
    print(cores)
    with tempfile.TemporaryDirectory() as folder:
        model, rows = Path(folder, "mlp.onnx"), Path(folder, "rows.npy")
        build_mlp(model, arguments.layers, arguments.width, arguments.positions)
        np.save(rows, examples(64, arguments.positions))
        options = f"--max-batch-size={arguments.max_batch_size}", f"--transport={arguments.transport}"
        with serving(model, cores.server, *options, program=program) as server:
            if arguments.spare_core:
                pin(server.process.pid, cores.server, cores.load)
            run(arguments, server, rows, cores.load)


if __name__ == "__main__":
    main()
