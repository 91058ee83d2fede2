"""Growth of the server's memory over a million calls, and over ten thousand dropped streams.

    python -m serving.memory --load PROGRAM [--quick]

Prints the resident memory at several points. Memory is flat if the last point is within 5 % or 10
MiB of the point after three tenths; until then it grows to what the largest number of calls in
flight needs. `--quick` does a tenth of everything. The exit status is 1 if memory is not flat.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from serving.encodings import grpc_message
from serving.load import STREAM_PATH, run_load
from serving.measure import Bench
from serving.plan import UNARY, Cell
from serving.processes import Cores, Running, memory_mib
from serving.run import cache_folder
from serving.servers import HOST, LANE, OURS, servers
from serving.workloads import TINY, write_models

_CALLS, _STREAMS, _POINTS, _CALLERS = 1_000_000, 10_000, 10, 64
_MOST_SECONDS = 1800.0
_WARM = 2
_GROWTH, _GROWTH_MIB = 1.05, 10.0


def is_flat(points: Sequence[float]) -> bool:
    """Return whether the last value, in MiB, is about the first, which is taken after the warm-up."""
    return points[-1] <= max(points[0] * _GROWTH, points[0] + _GROWTH_MIB)


def after_calls(bench: Bench, serving: Running, calls: int) -> Iterator[tuple[int, float]]:
    """Return the resident memory in MiB after each tenth of `calls` calls."""
    cell = Cell(TINY, UNARY, _CALLERS, _MOST_SECONDS, 0.0)
    load = bench.load_of(servers()[LANE], TINY, serving.port, cell)
    done = 0
    for _ in range(_POINTS):
        measured = run_load(bench.program, replace(load, calls=calls // _POINTS), core=bench.cores.load)
        if measured.errors:
            raise SystemExit(f"{measured.errors} errors; the last: {measured.last_message}")
        done += measured.answers
        yield done, memory_mib(serving.pids(), "Rss")


def after_streams(serving: Running, streams: int) -> Iterator[tuple[int, float]]:
    """Return the resident memory in MiB after each tenth of `streams` streams, each dropped before or
    after its first answer.
    """
    message = grpc_message(TINY, TINY.row())
    for point in range(1, _POINTS + 1):
        with grpc.insecure_channel(f"{HOST}:{serving.port}") as channel:
            call: Any = channel.stream_stream(STREAM_PATH)
            for number in range(streams // _POINTS):
                stream = call(iter([message] * 4), timeout=30)
                if number % 2:
                    next(stream)
                stream.cancel()
        yield point * (streams // _POINTS), memory_mib(serving.pids(), "Rss")


def main() -> None:
    """Print the points."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=Path, required=True, help="the load generator, built by make")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    arguments = parser.parse_args()
    cache, cores = cache_folder(), Cores.split()
    write_models(cache)
    os.sched_setaffinity(0, {cores.load})
    bench = Bench(cache, arguments.load.resolve(), cores)
    part = 10 if arguments.quick else 1
    flat = True
    for name in OURS:
        for what in ("calls", "streams"):
            with bench.started(servers()[name], TINY) as (serving, _):
                print(f"{name}: {memory_mib(serving.pids(), 'Rss'):.1f} MiB at the start", flush=True)
                points = []
                for done, mib in (
                    after_calls(bench, serving, _CALLS // part)
                    if what == "calls"
                    else after_streams(serving, _STREAMS // part)
                ):
                    points.append(mib)
                    print(f"  after {done:9,} {what}: {mib:7.1f} MiB", flush=True)
            warm = points[_WARM:]
            said = "flat" if is_flat(warm) else "NOT FLAT"
            print(f"  {said}: {warm[-1] - warm[0]:+.1f} MiB since the third tenth")
            flat = flat and is_flat(warm)
    sys.exit(0 if flat else 1)


if __name__ == "__main__":
    main()
