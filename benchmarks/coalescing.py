"""What client-side coalescing saves: calls per second, and processor time of client and server.

    python benchmarks/coalescing.py [--quick] [--rounds 5] [--seconds 3] [--callers 1 8 32 256]

N callers, threads or tasks, send their next request when the last is answered, through one client
with and without `coalesce=True` in turn. The model is tiny (two dense layers, 64 to 8), so the calls
cost more than the model. Client and server are two processes that share the machine's cores. Each
measurement has a client process of its own. Every answer is compared with the model's output.
Figures are medians of the rounds; ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from real_server import MODEL, Array, RealServer, build_mlp, cpu_seconds_of, examples, run_directly, serving

from tensorferry.client import InferenceClient, aio

CALLERS = (1, 8, 32, 256)
HOW = ("threads", "asyncio")
# Different inputs of the callers.
ROWS = 64
WARM_UP_SECONDS = 0.5
# Outputs of a row in batches of different sizes differ in the last bits.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Plan:
    """One measurement: where, how, and with which rows and expected answers (files)."""

    address: str
    server: int
    how: str
    callers: int
    coalesce: bool
    seconds: float
    rows: str
    answers: str


@dataclass(frozen=True, slots=True)
class Cost:
    """Calls per second, and microseconds of processor time for a call."""

    rate: float
    client: float
    server: float


@dataclass(frozen=True, slots=True)
class _Reading:
    calls: int
    at: float
    client: float
    server: float


class Load:
    """The callers of one process."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rows: Array = np.load(plan.rows)
        self._answers: Array = np.load(plan.answers)
        self._counts = [0] * plan.callers
        self._stopped = False

    def _reading(self) -> _Reading:
        return _Reading(
            sum(self._counts), time.monotonic(), time.process_time(), cpu_seconds_of(self._plan.server)
        )

    def _count(self, caller: int, output: Array) -> None:
        expected = self._answers[caller % ROWS][None]
        if not np.allclose(output, expected, rtol=TOLERANCE, atol=TOLERANCE):
            raise AssertionError(
                f"caller {caller} got {output}, not {expected}: it is another caller's answer"
            )
        self._counts[caller] += 1

    def _inputs(self, caller: int) -> dict[str, object]:
        return {"x": self._rows[caller % ROWS][None]}

    def threads(self) -> Cost:
        """Measure `infer` on threads."""
        with InferenceClient(self._plan.address, coalesce=self._plan.coalesce) as client:
            client.metadata(MODEL)

            def call(caller: int) -> None:
                inputs = self._inputs(caller)
                while not self._stopped:
                    self._count(caller, client.infer(MODEL, inputs, timeout=30)["y"])

            threads = [threading.Thread(target=call, args=(caller,)) for caller in range(self._plan.callers)]
            for thread in threads:
                thread.start()
            time.sleep(WARM_UP_SECONDS)
            begin = self._reading()
            time.sleep(self._plan.seconds)
            end = self._reading()
            self._stopped = True
            for thread in threads:
                thread.join()
        return self._cost(begin, end)

    async def tasks(self) -> Cost:
        """Measure `infer` in tasks."""
        async with aio.InferenceClient(self._plan.address, coalesce=self._plan.coalesce) as client:
            await client.metadata(MODEL)

            async def call(caller: int) -> None:
                inputs = self._inputs(caller)
                while not self._stopped:
                    self._count(caller, (await client.infer(MODEL, inputs, timeout=30))["y"])

            tasks = [asyncio.create_task(call(caller)) for caller in range(self._plan.callers)]
            await asyncio.sleep(WARM_UP_SECONDS)
            begin = self._reading()
            await asyncio.sleep(self._plan.seconds)
            end = self._reading()
            self._stopped = True
            await asyncio.gather(*tasks)
        return self._cost(begin, end)

    def _cost(self, begin: _Reading, end: _Reading) -> Cost:
        if not all(self._counts):
            raise AssertionError("a caller got no answer: its thread ended, or it waited all the time")
        calls = end.calls - begin.calls
        return Cost(
            calls / (end.at - begin.at),
            1e6 * (end.client - begin.client) / calls,
            1e6 * (end.server - begin.server) / calls,
        )


def load(plan: Plan) -> Cost:
    """Make the calls of a plan in this process."""
    callers = Load(plan)
    return callers.threads() if plan.how == "threads" else asyncio.run(callers.tasks())


def measured(plan: Plan) -> Cost:
    """Make the calls of a plan in a process of their own."""
    command = [sys.executable, __file__, "--load", json.dumps(asdict(plan))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Cost(**json.loads(done.stdout))


Pair = tuple[Cost, Cost]


def measure(
    server: RealServer, folder: Path, callers: list[int], rounds: int, seconds: float
) -> dict[tuple[str, int], list[Pair]]:
    """Return the costs without and with coalescing, of each round."""
    found: dict[tuple[str, int], list[Pair]] = {}
    for number in range(rounds):
        for how in HOW:
            for count in callers:
                costs = {}
                # The order changes, because the machine's speed does.
                for coalesce in (False, True) if number % 2 == 0 else (True, False):
                    costs[coalesce] = measured(
                        Plan(
                            server.address,
                            server.process.pid,
                            how,
                            count,
                            coalesce,
                            seconds,
                            str(folder / "rows.npy"),
                            str(folder / "answers.npy"),
                        )
                    )
                found.setdefault((how, count), []).append((costs[False], costs[True]))
    return found


def table(found: dict[tuple[str, int], list[Pair]]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        "| callers | | calls/s alone | joined | joined ÷ alone (from - to) | client µs | joined | server µs | joined |",
        "|---:|---|---:|---:|---|---:|---:|---:|---:|",
    ]

    def middle(pairs: list[Pair], which: int, of: Callable[[Cost], float]) -> str:
        return f"{median(of(pair[which]) for pair in pairs):,.0f}"

    for (how, callers), pairs in found.items():
        ratios = sorted(joined.rate / alone.rate for alone, joined in pairs)
        cells = [
            str(callers),
            how,
            middle(pairs, 0, lambda cost: cost.rate),
            middle(pairs, 1, lambda cost: cost.rate),
            f"{median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})",
            middle(pairs, 0, lambda cost: cost.client),
            middle(pairs, 1, lambda cost: cost.client),
            middle(pairs, 0, lambda cost: cost.server),
            middle(pairs, 1, lambda cost: cost.server),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print the table; with `--load`, make the calls of one measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--callers", type=int, nargs="+", default=list(CALLERS))
    parser.add_argument("--load", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(json.dumps(asdict(load(Plan(**json.loads(given.load))))))
        return
    rounds, seconds = (1, 1.0) if given.quick else (given.rounds, given.seconds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model.onnx"
        build_mlp(model, layers=2, width=16)
        rows = examples(ROWS)
        np.save(folder / "rows.npy", rows)
        np.save(folder / "answers.npy", run_directly(model, rows))
        with serving(model, None) as server:
            print(table(measure(server, folder, given.callers, rounds, seconds)))


if __name__ == "__main__":
    main()
