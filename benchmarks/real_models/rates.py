"""Requests a second by the default batch size, beside every fixed one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from python_models.calls import load_of, measured
from real_models.answers import Reference
from real_models.servers import started, status
from serving.load import shape_of
from serving.measure import Bench
from serving.plan import OPEN, UNARY
from serving.processes import Running

Row = Mapping[str, Any]

# Instead of a size.
DEFAULT = 0
SIZES = (1, 2, 4, 8, 16, 32)
# The most first, because its queue has rows for all sizes: the default learns in its warm-up.
IN_FLIGHT = (64, 16, 4)
_ONE_THREAD = ("--threads", "1")
_LEARN_SECONDS, _WARM_UP, _SECONDS = 12.0, 2.0, 4.0
# A window is at least as long as the requests in flight take, run one by one this often. Else large batches of a slow model
# may all end outside of it.
_TIMES_IN_FLIGHT = 3
OPEN_SHARE = 0.9
_OPEN_SECONDS = 60.0
# A size that is this much slower than the best in the first rounds is not measured again.
_ROUNDS_OF_ALL, _HOPELESS = 2, 0.8


def measure(bench: Bench, reference: Reference, path: Path, rounds: int) -> Iterator[Row]:
    """Yield the measurements of a model: in each round the default and each size that may be the best, a few seconds each.

    All servers run from the start to the end, and all but one of them are idle. A machine that becomes
    slower in minutes thus changes every size of a round alike.
    """
    with ExitStack() as servers:
        running = {}
        for size in (DEFAULT, *SIZES):
            options = ["--max-batch-size", str(size), "--batch-rows", "max"] if size else []
            running[size], _ = servers.enter_context(started(bench, reference, path, *_ONE_THREAD, *options))
        alone = _row(bench, reference, running[1], 1, _WARM_UP, _SECONDS)
        seconds = {each: max(_SECONDS, _TIMES_IN_FLIGHT * each / alone["rate"]) for each in IN_FLIGHT}
        _row(bench, reference, running[DEFAULT], IN_FLIGHT[0], _LEARN_SECONDS, seconds[IN_FLIGHT[0]])
        for in_flight in IN_FLIGHT:
            rows: list[Row] = []
            for number in range(rounds):
                # A batch never has more rows than there are requests: larger sizes measure noise.
                possible = [size for size in running if size <= in_flight]
                sizes = [size for size in possible if size == DEFAULT or _may_be_best(rows, size)]
                for size in sizes[::-1] if number % 2 else sizes:
                    found = {
                        "model": reference.model,
                        "round": number,
                        "size": size,
                        "in_flight": in_flight,
                        **_row(bench, reference, running[size], in_flight, _WARM_UP, seconds[in_flight]),
                    }
                    print(_line(found), flush=True)
                    rows.append(found)
                    yield found


def _row(
    bench: Bench, reference: Reference, serving: Running, in_flight: int, warm_up: float, seconds: float
) -> Row:
    shape = shape_of(UNARY, in_flight, False)
    row = measured(bench, serving, reference.calls[:1], shape, seconds, warm_up)
    kept = ("rate", "p50_ms", "p99_ms", "cpu_us_per_answer", "server_cores", "other_cores")
    return {"full_rows": status(serving)["batches"]["full_rows"], **{name: row[name] for name in kept}}


def open_loop(bench: Bench, reference: Reference, path: Path, rows: Sequence[Row]) -> Row:
    """Return the result of the default at 0.9 of the rate that the best size carries, with Poisson arrivals.

    `rows` are the measurements of the model in closed loops.
    """
    most = [row for row in rows if _load(row) == IN_FLIGHT[0]]
    size = best_size(most, "rate")
    best = median(row["rate"] for row in most if row["size"] == size)
    with started(bench, reference, path, *_ONE_THREAD) as (serving, _):
        load = load_of(
            bench, serving, reference.calls[:1], shape_of(OPEN, 0, False), _OPEN_SECONDS, _LEARN_SECONDS
        )
        row = bench.measured(serving, replace(load, rate=OPEN_SHARE * best))
        return {
            "model": reference.model,
            "best": best,
            "served": row["rate"] / best,
            **{
                name: row[name]
                for name in ("rate", "p50_ms", "p99_ms", "errors", "unanswered", "other_cores")
            },
        }


def _may_be_best(rows: Sequence[Row], size: int) -> bool:
    if not rows or rows[-1]["round"] < _ROUNDS_OF_ALL - 1:
        return True
    best: dict[int, float] = {}
    for row in rows:
        if row["size"] != DEFAULT:
            best[row["size"]] = max(row["rate"], best.get(row["size"], 0.0))
    return best[size] >= _HOPELESS * max(best.values())


def _load(row: Row) -> int:
    return int(row["in_flight"])


def best_size(rows: Sequence[Row], figure: str) -> int:
    """Return the size, of those of every round, with the best median: the highest rate, or the least of others."""
    rounds = {row["round"] for row in rows}
    values = {
        size: median(row[figure] for row in rows if row["size"] == size)
        for size in SIZES
        if {row["round"] for row in rows if row["size"] == size} == rounds
    }
    chosen = max if figure == "rate" else min
    return chosen(values, key=values.__getitem__)


def beside_best(rows: Sequence[Row], figure: str) -> list[float]:
    """Return the default's figure divided by the best size's, for each round of rows of one model and load.

    The best size of a round is chosen by the other rounds: the best of several equal sizes with noise would be a lucky one.
    """
    found = []
    rounds = sorted({row["round"] for row in rows})
    for number in rounds:
        others = [row for row in rows if row["round"] != number] or rows
        best = best_size(others, figure)
        by_size = {row["size"]: row[figure] for row in rows if row["round"] == number}
        if best in by_size:
            found.append(by_size[DEFAULT] / by_size[best])
    return found


def _line(row: Row) -> str:
    size = f"at most {row['size']}" if row["size"] else "default"
    return (
        f"{row['model']:18s} {size:10s} {row['in_flight']:3d} in flight: {row['rate']:8.1f}/s  p50 {row['p50_ms']:8.1f} ms  "
        f"{row['cpu_us_per_answer']:8.0f} us CPU  full batch {row['full_rows']}  others {row['other_cores']:4.2f}"
    )
