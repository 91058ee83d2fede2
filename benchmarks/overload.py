"""A real server under more load than it can serve.

    python benchmarks/overload.py [--quick] [--transport threaded]

A server process on one core serves an MLP; the load comes from another. The capacity is measured
(64 callers in a closed loop, without deadlines). Then an open loop offers a share or a multiple of
it, as Poisson arrivals with a gRPC deadline each; then the capacity is measured again, and so on.
The result is the requests answered by their deadlines, relative to the mean of the capacity before
and after, because the speed of a shared machine varies. At the end, for contrast, the same load
goes to a server without deadlines. Every answer is compared with ONNX Runtime's output for its
input alone.

On one core the transport of every call, refused or answered, takes time from the model. If the
transport needs a share u of the core at capacity, at most (1 - k·u) / (1 - u) of the capacity can
be answered at k times the capacity: the column "bound", with an estimate of u. The column "of core"
is the server's processor time relative to elapsed time; it is below 1 if other processes use the
core. "per core second" is on time/capacity with both divided by it. With `--spare-core` the server
may use the load's core, too, after its start: its model has one thread, which keeps one core busy,
and calls are read and refused on the other.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import apart_server
import numpy as np
from load_generator import (
    BY_CLIENT,
    BY_SERVER,
    LATE,
    ON_TIME,
    PROPER,
    REFUSED,
    Infer,
    OpenSummary,
    channels,
    closed_loop,
    open_loop,
    poisson,
    summarize,
)
from real_server import (
    Array,
    Cores,
    RealServer,
    batch_seconds,
    build_mlp,
    examples,
    output_of,
    pin,
    request_bytes,
    run_directly,
    serving,
)

LOADS = (0.5, 0.8, 1.5, 2.0, 3.0, 5.0, 10.0)
CONTRAST = 2.0
CALLERS = 64
EXAMPLES = 64
# The first part of each open loop is not counted, because the queue has not reached its length.
LEAD_IN = 0.5


@dataclass(frozen=True, slots=True)
class Capacity:
    """Closed loop: answers per second, and the server's processor time relative to elapsed time."""

    rate: float
    of_core: float

    def between(self, other: Capacity) -> Capacity:
        """Return the mean of both."""
        return Capacity((self.rate + other.rate) / 2, (self.of_core + other.of_core) / 2)


@dataclass(frozen=True, slots=True)
class Sample:
    """One round's open loop at one load, with the capacity around it."""

    load: float
    capacity: Capacity
    summary: OpenSummary
    of_core: float

    @property
    def ratio(self) -> float:
        """On-time throughput relative to the capacity."""
        return self.summary.on_time / self.capacity.rate

    @property
    def ratio_per_core(self) -> float:
        """The same for an equal share of the core in both."""
        return self.ratio * self.capacity.of_core / self.of_core


@dataclass(frozen=True, slots=True)
class Target:
    """A server, the requests for it, and their expected answers."""

    server: RealServer
    infers: Sequence[Infer]
    requests: Sequence[bytes]
    expected: Array

    def check(self, responses: Sequence[tuple[int, bytes]]) -> None:
        """Raise AssertionError unless each response is the model's output for its request."""
        for number, response in responses:
            np.testing.assert_allclose(output_of(response)[0], self.expected[number], rtol=1e-3, atol=1e-3)

    async def capacity(self, seconds: float) -> Capacity:
        """Measure the answers per second with enough callers."""
        used, started = self.server.cpu_seconds(), time.perf_counter()
        run = await closed_loop(self.infers, self.requests, CALLERS, seconds)
        of_core = (self.server.cpu_seconds() - used) / (time.perf_counter() - started)
        self.check(run.responses)
        return Capacity(run.rate, of_core)

    async def offer(
        self,
        load: float,
        capacity: Capacity,
        seconds: float,
        deadline: float,
        seed: int,
        *,
        send_deadline: bool = True,
    ) -> Sample:
        """Run one open loop at a multiple of the capacity."""
        schedule = poisson(load * capacity.rate, LEAD_IN + seconds, seed)
        used, started = self.server.cpu_seconds(), time.perf_counter()
        answers = await open_loop(self.infers, self.requests, schedule, deadline, send_deadline=send_deadline)
        of_core = (self.server.cpu_seconds() - used) / (time.perf_counter() - started)
        self.check([(at % EXAMPLES, answer.response) for at, answer in enumerate(answers) if answer.response])
        return Sample(load, capacity, summarize(answers, LEAD_IN, LEAD_IN + seconds), of_core)


HEADER = """\
     |             per second     |      on time/capacity             per  |       share of requests                          |  answered, ms |  lag  | of
load | offered answered  on time  | median (min-max)    bound core second | on time  late refused  expired by server, client  other |   p50    p99  | p99 ms | core"""


def line(samples: Sequence[Sample], transport: float) -> str:
    """Return a line of the table: the median over the rounds of each figure."""

    def middle(figure: str) -> float:
        values = [getattr(sample.summary, figure) for sample in samples]
        # A round without answers has no latency.
        return float(median([value for value in values if not math.isnan(value)] or [math.nan]))

    def share(fate: str) -> str:
        return f"{median(sample.summary.shares.get(fate, 0.0) for sample in samples):.1%}"

    load = samples[0].load
    ratios = [sample.ratio for sample in samples]
    other = max(sum(n for fate, n in s.summary.shares.items() if fate not in PROPER) for s in samples)
    bound = load if load <= 1 else max(0.0, (1 - load * transport) / (1 - transport))
    per_core = f"{median(sample.ratio_per_core for sample in samples):.3f}" if load > 1 else "-"
    return (
        f"{load:4g} | {middle('offered'):7.0f} {middle('answered'):8.0f} {middle('on_time'):8.0f}  "
        f"| {median(ratios):6.3f} ({min(ratios):.2f}-{max(ratios):.2f}) {bound:6.2f} {per_core:>11s} "
        f"| {share(ON_TIME):>7s} {share(LATE):>5s} {share(REFUSED):>7s} {share(BY_SERVER):>18s}, {share(BY_CLIENT):>6s} "
        f"{other:6.1%} | {middle('p50') * 1e3:5.0f} {middle('p99') * 1e3:6.0f}  | {middle('lag_p99') * 1e3:6.1f} "
        f"| {median(sample.of_core for sample in samples):4.0%}"
    )


async def run(
    arguments: argparse.Namespace, server: RealServer, contrast: RealServer, expected: Array
) -> None:
    """Run all rounds, and print the tables."""
    rows = examples(EXAMPLES, arguments.positions)
    requests = [request_bytes(row[None]) for row in rows]
    most, seconds = arguments.max_batch_size, arguments.seconds
    async with channels(server.address) as infers, channels(contrast.address) as others:
        target = Target(server, infers, requests, expected)
        # Until it has learned batch times under load.
        await target.capacity(1.0)
        full = await batch_seconds(infers[0], examples(most, arguments.positions))
        alone = await batch_seconds(infers[0], rows[:1])
        deadline = arguments.deadline_ms / 1e3 if arguments.deadline_ms else max(0.1, 5 * full)
        print(
            f"a batch of 1 takes {alone * 1e3:.1f} ms, one of {most} {full * 1e3:.1f} ms; "
            f"deadline {deadline * 1e3:.0f} ms from the intended time"
        )
        samples: list[Sample] = []
        shares = []
        before = await target.capacity(seconds / 2)
        capacities = [before]
        for turn in range(arguments.rounds):
            full = await batch_seconds(infers[0], examples(most, arguments.positions))
            shares.append(1 - before.rate * full / most)
            for load in arguments.loads:
                sample = await target.offer(load, before, seconds, deadline, turn)
                after = await target.capacity(seconds / 2)
                samples.append(replace(sample, capacity=before.between(after)))
                capacities.append(after)
                before = after
        rates = sorted(capacity.rate for capacity in capacities)
        transport = max(0.0, median(shares))
        print(
            f"capacity {median(rates):.0f} requests/s ({rates[0]:.0f} to {rates[-1]:.0f}), {CALLERS} callers; "
            f"the transport's share of the core at capacity: about {transport:.2f}\n{HEADER}"
        )
        for load in arguments.loads:
            print(line([sample for sample in samples if sample.load == load], transport))
        without_deadlines = Target(contrast, others, requests, expected)
        capacity = await without_deadlines.capacity(seconds)
        sample = await without_deadlines.offer(CONTRAST, capacity, seconds, deadline, 0, send_deadline=False)
        print("for contrast, a server that does not get the deadlines:")
        print(line([sample], transport))
        improper = {fate for sample in samples for fate in sample.summary.shares} - set(PROPER)
        print(f"other statuses: {', '.join(sorted(improper)) or 'none'}; every answer was right")


def main() -> None:
    """Print the tables."""
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
    program: Sequence[str] = ("-m", "tensorferry.server")
    if arguments.apart:
        os.environ[apart_server.COST] = arguments.apart
        program, arguments.layers, arguments.width, arguments.positions = (apart_server.__file__,), 2, 64, 1
    cores = Cores.split()
    print(cores)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "mlp.onnx")
        build_mlp(model, arguments.layers, arguments.width, arguments.positions)
        expected = run_directly(model, examples(EXAMPLES, arguments.positions))
        pin(os.getpid(), cores.load)
        options = f"--max-batch-size={arguments.max_batch_size}", f"--transport={arguments.transport}"
        with (
            serving(model, cores.server, *options, program=program) as server,
            serving(model, cores.server, *options, program=program) as contrast,
        ):
            if arguments.spare_core:
                for each in (server, contrast):
                    pin(each.process.pid, cores.server, cores.load)
            asyncio.run(run(arguments, server, contrast, expected))


if __name__ == "__main__":
    main()
