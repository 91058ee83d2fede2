"""Compare `tensorferry bench` with the load generator in C: the same server, requests and numbers in flight.

    python benchmarks/load_test_agreement.py --load PROGRAM [--quick] [--rounds N]

Two models: a function whose batches of at most 4 rows take 4 ms, so that neither client is the limit,
and an ONNX model that computes next to nothing, where a client in Python is. With larger batches the
time in which the client reads a batch's answers would count, too: the next batch waits for it. For the
function, the rate that `--find-rate` finds is compared with the same bisection of the generator's rates.
The server has the first core and the load the last. The two programs take turns; the medians of all
rounds are compared.
"""

from __future__ import annotations

import argparse
import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from real_server import Cores, bench, bench_steps, build_mlp, examples, request_bytes, serving

from serving.load import UNARY_PATH, Load, Shape, run_load, shape_of

IN_FLIGHT = (1, 8, 32)
# The rules of `--find-rate`: the largest p99, the share of a rate that is kept, and how close the bounds come.
_P99_MS, _KEPT, _CLOSE = 20.0, 0.97, 1.03
_CAPACITY_IN_FLIGHT = 64
_FIGURES = ("requests/s", "p50 ms", "p99 ms")
_WARMUP_SECONDS = 0.5


# A function that waits, so that the time of a batch does not depend on what else the machine does.
_FUNCTION = """
import time

from tensorferry.serving import FP32, model


@model(inputs={"x": FP32[-1, 1, 64]}, outputs={"y": FP32[-1, 8]}, max_batch_size=4)
def mlp(x):
    time.sleep(0.004)
    return x[:, 0, :8]
"""


def write_function(folder: Path) -> Path:
    """Write the file of a function whose batches take 4 ms."""
    (folder / "app.py").write_text(_FUNCTION)
    return folder / "app.py"


def write_tiny(folder: Path) -> Path:
    """Write an ONNX model that computes next to nothing."""
    build_mlp(folder / "mlp.onnx", 2, 16)
    return folder / "mlp.onnx"


MODELS = {"4 ms": write_function, "tiny": write_tiny}


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one run, in the order of the table. `tensorferry bench` also has warnings and its own time a call."""

    figures: tuple[float, float, float]
    warnings: tuple[str, ...] = ()
    own_ms: float = 0.0


def c_run(program: Path, address: str, body: Path, in_flight: int, seconds: float, core: int | None) -> Run:
    """Run the load generator in C, on one connection."""
    port = int(address.rpartition(":")[2])
    shape = Shape("unary", 1, in_flight, 1)
    measured = run_load(program, Load(port, UNARY_PATH, body, shape, seconds, _WARMUP_SECONDS, 1), core=core)
    return Run((measured.rate, measured.p50_ms, measured.p99_ms))


def python_run(address: str, rows: Path, in_flight: int, seconds: float, core: int | None) -> Run:
    """Run `tensorferry bench` with one process, which has one connection."""
    step = bench(
        address, rows, core, "--concurrency", in_flight, "--duration", seconds, "--warmup", _WARMUP_SECONDS
    )
    if step["failed"]:
        raise RuntimeError(f"requests failed: {step['errors']}")
    latency = step["latency_seconds"]
    return Run(
        (step["requests_per_second"], 1e3 * latency["p50"], 1e3 * latency["p99"]),
        tuple(step["warnings"]),
        1e3 * step["client"]["seconds_per_call"],
    )


def c_largest_rate(program: Path, address: str, body: Path, seconds: float, core: int | None) -> float:
    """Return the largest rate with a p99 below the bound, by bisection with the load generator in C.

    A rate that misses the bound is measured once more, as `--find-rate` does.
    """
    port = int(address.rpartition(":")[2])
    shape = shape_of("open", 1, http=False)

    def kept(rate: float) -> bool:
        load = Load(port, UNARY_PATH, body, shape, seconds, _WARMUP_SECONDS, 1, rate=rate)
        measured = run_load(program, load, core=core)
        return not measured.errors and measured.rate >= _KEPT * rate and measured.p99_ms < _P99_MS

    low, high = 0.0, 1.1 * c_run(program, address, body, _CAPACITY_IN_FLIGHT, seconds, core).figures[0]
    while high > low * _CLOSE:
        rate = (low + high) / 2
        if kept(rate) or kept(rate):
            low = rate
        else:
            high = rate
    return low


def python_largest_rate(address: str, rows: Path, seconds: float, core: int | None) -> float:
    """Return the largest rate with a p99 below the bound, as `tensorferry bench --find-rate` finds it."""
    steps = bench_steps(
        address, rows, core, "--find-rate", f"p99<{_P99_MS:g}ms", "--duration", seconds, "--warmup",
        _WARMUP_SECONDS,
    )  # fmt: skip
    return max(
        (
            step["rate"] for step in steps
            if not step["failed"] and step["requests_per_second"] >= _KEPT * step["rate"]
            and step["latency_seconds"]["p99"] < _P99_MS / 1e3
        ),
        default=0.0,
    )  # fmt: skip


def medians(runs: Sequence[Run]) -> tuple[float, ...]:
    """Return the median of each figure."""
    return tuple(median(values) for values in zip(*(run.figures for run in runs), strict=True))


def table(name: str, runs: Mapping[int, tuple[Sequence[Run], Sequence[Run]]]) -> list[str]:
    """Return lines of Markdown: the medians of C and Python, and their difference."""
    lines = ["| model | in flight | figure | generator in C | `tensorferry bench` | difference |"]
    lines.append("|---|---:|---|---:|---:|---:|")
    for in_flight, (theirs, ours) in runs.items():
        for figure, c, python in zip(_FIGURES, medians(theirs), medians(ours), strict=True):
            digits = 0 if figure == "requests/s" else 2
            values = f"{c:,.{digits}f} | {python:,.{digits}f} | {python / c - 1:+.1%}"
            lines.append(f"| {name} | {in_flight} | {figure} | {values} |")
    return lines


def measure_rates(program: Path, rounds: int, seconds: float) -> tuple[Sequence[float], Sequence[float]]:
    """Return the largest rates of the function that the two programs find, of C and of Python."""
    theirs: list[float] = []
    ours: list[float] = []
    cores = Cores.split()
    with served(write_function) as (address, folder):
        for number in range(rounds):
            for python in (False, True) if number % 2 else (True, False):
                if python:
                    ours.append(python_largest_rate(address, folder / "row.npy", seconds, cores.load))
                else:
                    theirs.append(c_largest_rate(program, address, folder / "body", seconds, cores.load))
    return theirs, ours


@contextmanager
def served(write: Callable[[Path], Path]) -> Iterator[tuple[str, Path]]:
    """Serve a model; yield the server's address and a folder with a request for each program."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        row = examples(1)
        np.save(folder / "row.npy", row)
        message = request_bytes(row)
        (folder / "body").write_bytes(struct.pack(">BI", 0, len(message)) + message)
        with serving(write(folder), Cores.split().server, "--max-batch-size", "32") as server:
            yield server.address, folder


def measure(
    write: Callable[[Path], Path], program: Path, rounds: int, seconds: float
) -> Mapping[int, tuple[Sequence[Run], Sequence[Run]]]:
    """Return the runs of both programs, by the number in flight."""
    runs: dict[int, tuple[list[Run], list[Run]]] = {number: ([], []) for number in IN_FLIGHT}
    cores = Cores.split()
    with served(write) as (address, folder):
        for number in range(rounds):
            for in_flight, (theirs, ours) in runs.items():
                # Each begins half of the rounds.
                for python in (False, True) if number % 2 else (True, False):
                    load = seconds, cores.load
                    if python:
                        ours.append(python_run(address, folder / "row.npy", in_flight, *load))
                    else:
                        theirs.append(c_run(program, address, folder / "body", in_flight, *load))
    return runs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=Path, required=True, help="the load generator, built by make")
    parser.add_argument("--quick", action="store_true", help="one round of a second each")
    parser.add_argument("--rounds", type=int, help="(default: 5; with --quick 1)")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    seconds = 1.0 if arguments.quick else 3.0
    os.environ.pop("TENSORFERRY_TARGET", None)
    print(f"{Cores.split()}; medians of {rounds} rounds of {seconds:g} s each", flush=True)
    for name, write in MODELS.items():
        runs = measure(write, arguments.load.resolve(), rounds, seconds)
        print("\n".join(table(name, runs)), flush=True)
        for in_flight, (_, ours) in runs.items():
            own = median(run.own_ms for run in ours)
            print(f"{in_flight} in flight: tensorferry bench uses {own:.2f} ms of a core for each call")
            warned = [warning for run in ours for warning in run.warnings]
            if warned:
                print(
                    f"{in_flight} in flight: {len(warned)} warnings in {rounds} runs, the first: {warned[0]}"
                )
        print()
    c, python = map(median, measure_rates(arguments.load.resolve(), rounds, seconds))
    print(f"largest rate with p99 < {_P99_MS:g} ms, function: generator in C {c:,.0f} requests/s,")
    print(f"`tensorferry bench --find-rate` {python:,.0f} requests/s, difference {python / c - 1:+.1%}")


if __name__ == "__main__":
    main()
