"""Closed loops against a real server: the gain of waiting for returning clients, and the ideal.

    python benchmarks/closed_server.py [--quick]

N clients send their next request after the last answer, in turn to a server that may wait for them
and to one that never does (greedy). A server process has one core, the clients another. The mean
latency R is the queue and compute time that the server reports, and the rest: transport both ways
and the client's own time. Ideally a request would wait for no other and be in a batch of all N:
L(N) + rest, where L(N) is the time of a batch of N rows alone (N is at most the largest batch).
"Of ideal" is (L(N) + rest) / R, which is the throughput as a share of N / (L(N) + rest). Figures are
medians of the rounds.

With all N in one batch each client waits for the last one to return, and transport on one core
handles them one by one. So up to half of the transport's time counts as queue time, which no rule
avoids.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from load_generator import ClosedRun, Infer, channels, closed_loop
from real_server import Cores, batch_seconds, build_mlp, examples, pin, request_bytes, serving

from tensorferry.protos import inference_pb2 as pb

CALLERS = (1, 8, 32, 64)
GREEDY, RETURNERS = "greedy", "returners"
GREEDY_PROGRAM = str(Path(__file__).with_name("greedy_server.py"))


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Figures of a closed loop: answers a second, mean seconds of a request, mean rows of its batch."""

    rate: float
    latency: float
    queue: float
    compute: float
    rows: float
    load_cpu_share: float

    @property
    def rest(self) -> float:
        """The time of transport both ways and of the client itself."""
        return self.latency - self.queue - self.compute

    def of_ideal(self, batch: float) -> float:
        """The ideal latency, with a batch of all callers that takes so long, as a share of the real one."""
        return (batch + self.rest) / self.latency


def explained(run: ClosedRun) -> LoopFigures:
    """Return the figures that the responses report."""
    all_parameters = [pb.ModelInferResponse.FromString(response).parameters for _, response in run.responses]

    def mean(name: str) -> float:
        return fmean(parameters[name].int64_param for parameters in all_parameters)

    # A mean over batches, because large batches have more requests.
    batches = {p["batch_number"].int64_param: p["batch_rows"].int64_param for p in all_parameters}
    return LoopFigures(
        run.rate,
        run.latency,
        mean("queue_us") / 1e6,
        mean("compute_us") / 1e6,
        fmean(batches.values()),
        run.load_cpu_share,
    )


HEADER = (
    "   N | rule      | answers/s (min-max) | rows | queue compute  rest ms | L(N) ms | of ideal | load's cpu"
)


def line(callers: int, rule: str, runs: Sequence[LoopFigures], batch: Sequence[float]) -> str:
    """A line of the table: the medians of the rounds."""
    rates = [run_figures.rate for run_figures in runs]
    queue, compute, rest = (
        median(getattr(run_figures, part) for run_figures in runs) * 1e3
        for part in ("queue", "compute", "rest")
    )
    ratio = median(run_figures.of_ideal(seconds) for run_figures, seconds in zip(runs, batch, strict=True))
    return (
        f"{callers:4d} | {rule:9s} | {median(rates):6.0f} ({min(rates):5.0f}-{max(rates):5.0f}) "
        f"| {median(run_figures.rows for run_figures in runs):4.1f} | {queue:5.1f} {compute:7.1f} {rest:5.1f}    "
        f"| {median(batch) * 1e3:7.1f} | {ratio:8.3f} | {median(run_figures.load_cpu_share for run_figures in runs):10.0%}"
    )


async def run(arguments: argparse.Namespace, addresses: dict[str, str]) -> None:
    """All rounds, and the table."""
    rows = examples(64, arguments.positions)
    requests = [request_bytes(row[None], explain=True) for row in rows]
    most = arguments.max_batch_size
    runs: dict[tuple[int, str], list[LoopFigures]] = {}
    alone: dict[int, list[float]] = {callers: [] for callers in CALLERS}
    async with channels(addresses[GREEDY]) as greedy, channels(addresses[RETURNERS]) as returners:
        servers: dict[str, Sequence[Infer]] = {GREEDY: greedy, RETURNERS: returners}
        for callers in CALLERS:
            batch = examples(min(callers, most), arguments.positions)
            for infers in servers.values():
                # First let the model forget the previous number of clients.
                await closed_loop(infers, requests, callers, arguments.lead_in)
            for turn in range(arguments.rounds):
                # On the server without the rule.
                alone[callers].append(await batch_seconds(greedy[0], batch, 9))
                for rule in (GREEDY, RETURNERS) if turn % 2 else (RETURNERS, GREEDY):
                    got = await closed_loop(servers[rule], requests, callers, arguments.seconds)
                    runs.setdefault((callers, rule), []).append(explained(got))
    print(HEADER)
    for callers in CALLERS:
        for rule in (GREEDY, RETURNERS):
            print(line(callers, rule, runs[callers, rule], alone[callers]))
        gain = median(
            with_rule.rate / without.rate
            for with_rule, without in zip(runs[callers, RETURNERS], runs[callers, GREEDY], strict=True)
        )
        print(f"     | returners / greedy: {gain:.3f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement (default: 1.5)")
    parser.add_argument(
        "--lead-in", type=float, default=2.0, help="seconds before those of N callers (default: 2)"
    )
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--positions", type=int, default=1, help="of a row, which cost as much as rows")
    parser.add_argument("--quick", action="store_true", help="one short round, about 20 s")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.lead_in, arguments.layers = 1, 0.5, 0.3, 6
    cores = Cores.split()
    print(cores)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "mlp.onnx")
        build_mlp(model, arguments.layers, arguments.width, arguments.positions)
        pin(os.getpid(), cores.load)
        batch = f"--max-batch-size={arguments.max_batch_size}"
        with (
            serving(model, cores.server, batch) as returners,
            serving(model, cores.server, batch, program=(GREEDY_PROGRAM,)) as greedy,
        ):
            addresses = {GREEDY: greedy.address, RETURNERS: returners.address}
            asyncio.run(run(arguments, addresses))


if __name__ == "__main__":
    main()
