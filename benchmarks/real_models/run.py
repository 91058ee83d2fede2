"""Serve real models of Python packages, check their answers, and measure their default batch sizes.

    python -m real_models.run --files FOLDER [--load PROGRAM | --quick] [--rounds N] [--only MODEL,...] [--rates MODEL,...] [--add]

Results are written to real_models.json in the cache of `make bench` as they arrive; `real_models.report` makes the page
from them. With --quick only verdicts and answers of the small models are looked at, and nothing is written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from real_models import rates
from real_models.answers import Reference, count
from real_models.catalogue import DETECTION, MODELS, RealModel
from real_models.report import results_file, table
from real_models.servers import ready_seconds, ready_together, started, status
from serving.load import LoadError
from serving.machine import describe
from serving.measure import Bench, VisitError
from serving.processes import Cores
from serving.run import cache_folder, save
from serving.workloads import write_models

_ROUNDS = 6
_OPEN_LOOPS = 3
_DISTINCT, _CALLS = 24, 300


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--files",
        type=lambda said: Path(said).resolve(),
        required=True,
        help="the packages, installed by make",
    )
    parser.add_argument("--load", type=Path, default=Path(), help="the load generator, built by make")
    parser.add_argument("--quick", action="store_true", help="verdicts and answers of the small models")
    parser.add_argument(
        "--rounds", type=int, default=_ROUNDS, help="rounds of rates, 0 for none (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="models, with commas between")
    parser.add_argument("--rates", default="", help="models whose rates are measured (default: all)")
    parser.add_argument(
        "--add", action="store_true", help="keep the results of other models from the last run"
    )
    arguments = parser.parse_args()
    cache, cores, everywhere = cache_folder(), Cores.split(), os.sched_getaffinity(0)
    write_models(cache)
    spread = Bench(cache, arguments.load, Cores(cores.server, cores.load, shared=True))
    pinned = Bench(cache, arguments.load.resolve(), cores)
    only, rated = (frozenset(filter(None, said.split(","))) for said in (arguments.only, arguments.rates))
    models = [
        model for model in MODELS if (model.name in only if only else model.small or not arguments.quick)
    ]
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "command": "make real-models",
        "machine": describe(cache), "missing": {}, "models": [], "measurements": [], "open": [],
        "failures": [], "rounds": arguments.rounds,
    }  # fmt: skip
    began, earlier_minutes = time.monotonic(), 0.0
    if arguments.add:
        earlier = json.loads(results_file(cache).read_text())
        again = {model.name for model in models}
        for kind, name in (
            ("models", "name"),
            ("measurements", "model"),
            ("open", "model"),
            ("failures", "model"),
        ):
            results[kind] += [row for row in earlier[kind] if row[name] not in again]
        results["together"] = earlier.get("together")
        earlier_minutes = earlier["minutes"]

    def arrived() -> None:
        results["minutes"] = round(earlier_minutes + (time.monotonic() - began) / 60, 1)
        if not arguments.quick:
            save(results, results_file(cache))

    references: dict[str, Reference] = {}
    for model in models:
        path = model.path(arguments.files, cache)
        references[model.name] = reference = Reference(model, path, _DISTINCT)
        try:
            found = _looked_at(spread, model, reference, arguments.files, ready=not arguments.quick)
        except VisitError as error:
            results["failures"].append(_failure(model.name, error))
            continue
        results["models"].append(found)
        arrived()
    if not arguments.quick and not only:
        served = [(references[model.name], model.path(arguments.files, cache)) for model in models]
        try:
            results["together"] = ready_together(spread, served)
        except VisitError as error:
            results["failures"].append(_failure("all in one server", error))
        arrived()
    batched = [
        found["name"]
        for found in results["models"]
        if found["max_batch_size"] > 1 and (not rated or found["name"] in rated)
    ]
    os.sched_setaffinity(0, {cores.load})
    rounds = 0 if arguments.quick else arguments.rounds
    for model in (each for each in models if rounds and each.name in batched):
        reference, path = references[model.name], model.path(arguments.files, cache)
        try:
            for row in rates.measure(pinned, reference, path, rounds):
                results["measurements"].append(row)
            if model.name == DETECTION:
                rows = [row for row in results["measurements"] if row["model"] == model.name]
                results["open"] += [
                    rates.open_loop(pinned, reference, path, rows) for _ in range(_OPEN_LOOPS)
                ]
        except (VisitError, LoadError) as error:
            results["failures"].append(_failure(model.name, error))
        arrived()
    os.sched_setaffinity(0, everywhere)
    print(table(results))
    for failure in results["failures"]:
        print(f"FAILED {failure['model']}: {failure['reason']}")
    wrong = sum(found["wrong"] for found in results["models"])
    sys.exit(bool(wrong or results["failures"]))


def _failure(model: str, error: Exception) -> Mapping[str, Any]:
    return {"round": 0, "server": model, "model": model, "reason": str(error)}


def _looked_at(
    bench: Bench, model: RealModel, reference: Reference, files: Path, *, ready: bool
) -> Mapping[str, Any]:
    """Return a model's facts, verdict and answers; with `ready` also the time until it is ready."""
    path = model.path(files, bench.cache)
    with started(bench, reference, path) as (serving, _):
        right, wrong = count(reference, serving.port, _CALLS)
        said = status(serving)
    for each in wrong[:3]:
        print(f"WRONG {model.name}: {each}", flush=True)
    found = {
        "name": model.name,
        "package": model.package,
        "version": model.version(files),
        "file": Path(model.file).name,
        "bytes": path.stat().st_size,
        "inputs": reference.shapes,
        "verdict": said["batching_verdict"],
        "why": said["batching"],
        "max_batch_size": said["settings"]["max_batch_size"],
        "right": right,
        "wrong": len(wrong),
        "mean_rows": said["batches"]["rows"] / said["batches"]["ran"],
        **(ready_seconds(bench, reference, path) if ready else {}),
    }
    print(
        f"{model.name:18s} {found['verdict']:9s} {right} right, {len(wrong)} wrong, {found['mean_rows']:.1f} rows a batch; {found['why']}",
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
