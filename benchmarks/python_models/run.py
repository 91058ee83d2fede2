"""Measure Python around models, in rounds, and print the required ratios.

    python -m python_models.run --load PROGRAM [--quick] [--rounds N] [--only PART,...]

The parts are `functions` (a plain Python function, beside other servers), `steps` (what an empty step costs, beside
Triton), `images` (JPEG decoding in worker processes) and `text` (a sentence encoder with its tokenizer). Results are
written to python_models.json in the cache of `make bench`; `python_models.report` makes the page from them.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from python_models import images, plan, steps, text
from python_models.plan import visits
from python_models.report import all_ratios, results_file
from python_models.steps import OURS
from serving.load import LoadError
from serving.machine import describe
from serving.measure import Bench, VisitError
from serving.processes import Cores
from serving.reporting.ratios import table
from serving.run import cache_folder, save
from serving.servers import LANE, servers

Row = Mapping[str, Any]

_ROUNDS, _QUICKLY = 5, 0.3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=Path, required=True, help="the load generator, built by make")
    parser.add_argument("--quick", action="store_true", help="one short round, for whether it works")
    parser.add_argument("--rounds", type=int, help=f"(default: {_ROUNDS}; with --quick 1)")
    parser.add_argument("--only", default="", help="parts, with commas between")
    arguments = parser.parse_args()
    shortened = _QUICKLY if arguments.quick else 1.0
    cache, cores = cache_folder(), Cores.split()
    cache.mkdir(parents=True, exist_ok=True)
    pinned = Bench(cache, arguments.load.resolve(), cores, retries=0 if arguments.quick else 1)
    spread = Bench(cache, arguments.load.resolve(), Cores(cores.server, cores.load, shared=True))
    everywhere = os.sched_getaffinity(0)
    absent = _absent(cache)
    for what, reason in absent.items():
        print(f"{what}: not measured, because {reason}")

    def functions(number: int, server: str) -> Iterator[Row]:
        done = len(pinned.rows)
        for visit in visits(number, server, shortened):
            pinned.visit(visit, number)
        yield from ({"part": plan.PART, **row} for row in pinned.rows[done:])

    parts: Mapping[str, tuple[Sequence[str], Callable[[int, str], Iterator[Row]]]] = {
        plan.PART: (plan.SERVERS, functions),
        steps.PART: (steps.SERVERS, lambda number, server: steps.measure(pinned, number, shortened, server)),
        images.PART: ((OURS,), lambda number, _: images.measure(spread, number, shortened)),
        text.PART: ((OURS,), lambda number, _: text.measure(pinned, number, shortened)),
    }
    wanted = [part for part in parts if part in (arguments.only or ",".join(parts)).split(",")]
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "command": "make bench-python",
        "machine": describe(cache), "missing": absent, "measurements": [], "failures": pinned.failures,
    }  # fmt: skip
    measurements: list[Row] = results["measurements"]
    began = time.monotonic()
    for number in range(arguments.rounds or (1 if arguments.quick else _ROUNDS)):
        print(f"--- round {number + 1}", flush=True)
        results["rounds"] = number + 1
        for part in wanted:
            of_servers, measure = parts[part]
            os.sched_setaffinity(0, everywhere if part == images.PART else {cores.load})
            for server in of_servers[::-1] if number % 2 else of_servers:
                if not {part, server} & absent.keys():
                    measurements += _measured(measure(number, server), pinned.failures, number, server, part)
            results["minutes"] = round((time.monotonic() - began) / 60, 1)
            save(results, results_file(cache, arguments.quick))
    print(table(all_ratios(measurements)))
    # A peer's failure is reported on the page; a failure of tensorferry is an error.
    sys.exit(any(failure["server"] in (OURS, LANE) for failure in pinned.failures))


def _measured(
    rows: Iterator[Row], failures: list[dict[str, Any]], number: int, server: str, part: str
) -> Iterator[Row]:
    """Yield the rows until the server fails."""
    try:
        yield from rows
    except (VisitError, LoadError) as error:
        failures.append({"round": number, "server": server, "model": part, "reason": str(error)})
        print(f"FAILED {server}, {part}: {error}", flush=True)


def _absent(cache: Path) -> dict[str, str]:
    """Return parts and servers that cannot be measured, with the reason."""
    known = servers()
    absent = {
        name: "it is not installed (make bench-peers)"
        for name in {*plan.SERVERS, *steps.PEERS}
        if not known[name].installed(cache)
    }
    if find_spec("PIL") is None:
        absent[images.PART] = "the package Pillow is not installed"
    if reason := text.missing():
        absent[text.PART] = reason
    return absent


if __name__ == "__main__":
    main()
