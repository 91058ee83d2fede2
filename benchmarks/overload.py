"""What a real server does when it is offered more than it can do.

    python benchmarks/overload.py [--quick]

A server process on one core serves an MLP; the load comes from another. In each round first
the capacity is measured (64 callers in a closed loop, no deadlines), then open loops offer
shares and multiples of it, Poisson arrivals, each request with a gRPC deadline. What counts is
the requests answered by their deadlines, as a share of the capacity of the same round. At the
end, for contrast, the same load on a server that is not told the deadlines. Every answer is
compared with what ONNX Runtime gives for its input alone.

On one core each refusal takes from the model the time that it takes the transport: with c
seconds of core time a call, on-time throughput at k times the capacity can hardly be more than
1 - (k - 1) · capacity · c / (1 - capacity · c) of it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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

LOADS = (0.5, 0.8, 1.5, 2.0, 3.0)
CONTRAST = 2.0
CALLERS = 64
EXAMPLES = 64
# Of each open loop the first part is not counted: the queue is not yet what it will be.
LEAD_IN = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """One round's open loop at one load, beside the capacity of the round."""

    load: float
    capacity: float
    summary: OpenSummary


def check(responses: Sequence[tuple[int, bytes]], expected: Array) -> None:
    """AssertionError unless each response is what the model says of its request's input."""
    for number, response in responses:
        np.testing.assert_allclose(output_of(response)[0], expected[number], rtol=1e-3, atol=1e-3)


async def measure_capacity(
    infers: Sequence[Infer], requests: Sequence[bytes], expected: Array, seconds: float
) -> float:
    """Answers a second of a server that always has enough to do."""
    run = await closed_loop(infers, requests, CALLERS, seconds)
    check(run.responses, expected)
    return run.rate


async def offer(
    infers: Sequence[Infer],
    requests: Sequence[bytes],
    expected: Array,
    rate: float,
    seconds: float,
    deadline: float,
    *,
    seed: int,
    told: bool = True,
) -> OpenSummary:
    """One open loop; every answer is checked."""
    schedule = poisson(rate, LEAD_IN + seconds, seed)
    answers = await open_loop(infers, requests, schedule, deadline, told=told)
    check([(at % EXAMPLES, a.response) for at, a in enumerate(answers) if a.response], expected)
    return summarize(answers, LEAD_IN, LEAD_IN + seconds)


HEADER = (
    " load | offered/s answered/s on time/s | on time/capacity | on time   late refused "
    "expired by server, client  other |  p50 ms  p99 ms | lag p99 ms"
)


def line(load: str, samples: Sequence[Sample]) -> str:
    """A line of the table: the median over the rounds of each figure."""

    def middle(figure: str) -> float:
        return median(getattr(sample.summary, figure) for sample in samples)

    def share(*fates: str) -> float:
        return median(sum(s.summary.shares.get(fate, 0.0) for fate in fates) for s in samples)

    others = max(sum(share for fate, share in s.summary.shares.items() if fate not in PROPER) for s in samples)
    ratios = [sample.summary.on_time / sample.capacity for sample in samples]
    return (
        f"{load:>5s} | {middle('offered'):9.0f} {middle('answered'):10.0f} {middle('on_time'):9.0f} "
        f"| {median(ratios):6.3f} ({min(ratios):.2f}-{max(ratios):.2f}) "
        f"| {share(ON_TIME):6.1%} {share(LATE):6.1%} {share(REFUSED):7.1%} "
        f"{share(BY_SERVER):17.1%}, {share(BY_CLIENT):6.1%} {others:6.1%} "
        f"| {middle('p50') * 1e3:7.1f} {middle('p99') * 1e3:7.1f} | {middle('lag_p99') * 1e3:10.1f}"
    )


async def run(arguments: argparse.Namespace, server: RealServer, contrast: RealServer, expected: Array) -> None:
    """All rounds, and the tables."""
    requests = [request_bytes(row[None]) for row in examples(EXAMPLES)]
    async with channels(server.address) as infers, channels(contrast.address) as untold:
        full = await batch_seconds(infers[0], arguments.max_batch_size)
        alone = await batch_seconds(infers[0], 1)
        deadline = arguments.deadline_ms / 1e3 if arguments.deadline_ms else max(0.1, 5 * full)
        print(
            f"a batch of 1 takes {alone * 1e3:.1f} ms, one of {arguments.max_batch_size} {full * 1e3:.1f} ms; "
            f"deadline {deadline * 1e3:.0f} ms from the intended time"
        )
        # Until it has learned how long batches take while calls come in.
        await measure_capacity(infers, requests, expected, 1.0)
        samples: list[Sample] = []
        for turn in range(arguments.rounds):
            capacity = await measure_capacity(infers, requests, expected, arguments.seconds)
            for load in LOADS:
                summary = await offer(
                    infers, requests, expected, load * capacity, arguments.seconds, deadline, seed=turn
                )
                samples.append(Sample(load, capacity, summary))
        capacities = sorted({sample.capacity for sample in samples})
        spread = f"{capacities[0]:.0f} to {capacities[-1]:.0f}"
        print(f"capacity: {median(capacities):.0f} requests/s (rounds: {spread}), {CALLERS} callers\n{HEADER}")
        for load in LOADS:
            print(line(f"{load:g}", [sample for sample in samples if sample.load == load]))
        capacity = await measure_capacity(untold, requests, expected, arguments.seconds)
        summary = await offer(
            untold,
            requests,
            expected,
            CONTRAST * capacity,
            arguments.seconds,
            deadline,
            seed=0,
            told=False,
        )
        print(f"for contrast, deadlines known to the client only:\n{HEADER}")
        print(line(f"{CONTRAST:g}", [Sample(CONTRAST, capacity, summary)]))
        others = {fate for sample in samples for fate in sample.summary.shares} - set(PROPER)
        print(f"other statuses: {', '.join(sorted(others)) or 'none'}")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement (default: 2.5)")
    parser.add_argument("--deadline-ms", type=float, default=0, help="0: 5 full batches, at least 100 ms")
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="one short round, below 20 s")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 1.0
    cores = Cores.split()
    print(cores)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "mlp.onnx")
        build_mlp(model, arguments.layers, arguments.width)
        expected = run_directly(model, examples(EXAMPLES))
        pin(os.getpid(), cores.load)
        batch = f"--max-batch-size={arguments.max_batch_size}"
        with serving(model, cores.server, batch) as server, serving(model, cores.server, batch) as contrast:
            asyncio.run(run(arguments, server, contrast, expected))


if __name__ == "__main__":
    main()
