"""Measure every installed server, in rounds, and print the required ratios.

    python -m serving.run --load PROGRAM [--quick] [--rounds N] [--only SERVER,...]

The server has one core and the load another. Each round measures every server once. Results are
written to results.json in the cache (quick.json with --quick) as they arrive;
`serving.reporting.report` makes the page from them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from serving.machine import describe
from serving.measure import Bench
from serving.plan import RAW, Visit, full_round, quick_round
from serving.processes import Cores
from serving.reporting.ratios import all_ratios, table
from serving.servers import HTTP, OURS, servers
from serving.workloads import write_models

_ROUNDS, _MINUTES = 5, 38.0


def cache_folder() -> Path:
    """Return the folder of peers, models and results."""
    return Path(os.environ.get("TENSORFERRY_BENCH") or Path.home() / ".cache" / "tensorferry-bench")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=Path, required=True, help="the load generator, built by make")
    parser.add_argument(
        "--quick", action="store_true", help="ours, bare gRPC and raw ONNX Runtime, one round"
    )
    parser.add_argument("--rounds", type=int, help=f"(default: {_ROUNDS}; with --quick 1)")
    parser.add_argument(
        "--minutes", type=float, default=_MINUTES, help="no round is begun that would end later"
    )
    parser.add_argument("--only", default="", help="servers, with commas between")
    parser.add_argument("--models", default="", help="models, with commas between")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else _ROUNDS)
    cache = cache_folder()
    write_models(cache)
    cores = Cores.split()
    os.sched_setaffinity(0, {cores.load})
    bench = Bench(cache, arguments.load.resolve(), cores, retries=0 if arguments.quick else 1)
    missing = sorted(name for name, server in servers().items() if not server.installed(cache))
    only, models = (frozenset(filter(None, said.split(","))) for said in (arguments.only, arguments.models))
    if missing and not arguments.quick:
        print(f"not installed, not measured: {', '.join(missing)} (make bench-peers)")
    if cores.server == cores.load:
        print("there is one core for server and load: mistrust the figures")
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": "make bench" + (" QUICK=1" if arguments.quick else ""),
        "cores": {"server": cores.server, "load": cores.load},
        "machine": describe(cache),
        "missing": missing,
        "measurements": bench.rows,
        "failures": bench.failures,
    }
    path = cache / "results" / ("quick.json" if arguments.quick else "results.json")

    def wanted(visit: Visit) -> bool:
        chosen = (not only or visit.server in only) and (not models or visit.model in models)
        return chosen and visit.server not in missing

    began, longest = time.monotonic(), 0.0
    for number in range(rounds):
        at = time.monotonic()
        if number and at - began + longest > arguments.minutes * 60:
            print(f"no time for another round: {number} of {rounds} are done")
            break
        print(f"--- round {number + 1} of {rounds}", flush=True)
        results["rounds"] = number + 1
        for visit in filter(wanted, quick_round(number) if arguments.quick else full_round(number)):
            bench.visit(visit, number)
            results["minutes"] = round((time.monotonic() - began) / 60, 1)
            save(results, path)
        longest = max(longest, time.monotonic() - at)
    print(table(all_ratios(bench.rows)))
    if bench.failures:
        print(f"{len(bench.failures)} measurements failed, see above")
    # A peer's failure is reported on the page; a failure of tensorferry is an error.
    sys.exit(any(failure["server"] in (*OURS, HTTP, RAW) for failure in bench.failures))


def save(results: dict[str, Any], path: Path) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1))
    part.rename(path)


if __name__ == "__main__":
    main()
