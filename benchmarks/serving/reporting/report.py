"""Make the generated part of docs/results/performance.md, and its plots, from the results of
serving.run.

    python -m serving.reporting.report [--results FILE] [--docs FOLDER]

Text around the generated part is kept. A missing page is created with the generated part alone.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sections import Section

from serving.plan import RAW
from serving.reporting import plots, tables
from serving.reporting.ratios import Row, all_ratios
from serving.run import cache_folder
from serving.servers import ECHO_THREADS, MAX_BATCH_SIZE, servers
from serving.workloads import WORKLOADS

SECTION = Section(
    "<!-- made by `make bench`: change benchmarks/serving/reporting/report.py instead -->",
    "<!-- end of what `make bench` made -->",
)
EMPTY_PAGE = f"# Performance\n\n{SECTION.begin}\n{SECTION.end}\n"

TITLES = {
    "tiny": "The tiny model",
    "null": "A model that does nothing",
    "mlp": "The MLP",
    "transformer": "The transformer",
}

METHOD = f"""## Method

- The server, with all its processes and threads, has one core, the load generator another. Every server is
  measured once per round. The machine's speed drifts, so **ratios are taken within a round**, and the
  median over the rounds is shown. Every other round runs in reverse order.
- The load generator is one thread of C (`benchmarks/serving/generator`). It checks the status and size of
  every answer, matches the messages of a stream by id, and stops if its counts disagree. Before each
  measurement one answer is compared with ONNX Runtime's own.
- Closed loop: a fixed number of calls in flight, over at most 4 connections (gRPC) or one connection each
  (HTTP/1.1). A call counts by the share of its time that is within the measurement. Open loop: Poisson
  arrivals, with latency from the intended send time.
- Raw ONNX Runtime is measured right after the calls that it is compared with, while the server is idle: at
  least ten runs of each size.
- The largest batch is {MAX_BATCH_SIZE} everywhere, and ONNX Runtime has one thread. tensorferry has its default options.
  The others have a window of 2 ms unless noted. MLServer and LitServe have longer windows for the larger
  models, without which they batch badly. BentoML's dispatcher adapts by itself.
- "Bare threaded echo" is grpcio's servicer with {ECHO_THREADS} threads (over many streams, one each) that parses each
  request and answers without a model. Triton is the server in PyTriton's wheel with its Python backend; the
  wheel has no ONNX Runtime backend. mosec, LitServe, BentoML and Ray Serve use HTTP/1.1, the others gRPC.
- CPU time counts all processes of a server. Memory is their proportional share, after the load."""

NOT_MEASURED = """## What is not measured

More than one core for the server, a network between two machines, TLS, several models at once, string
tensors, Triton's own ONNX Runtime backend, and tuning of other servers beyond their window. The machine is
small and shared: do not compare absolute figures of different pages."""


def generated(results: Mapping[str, Any]) -> str:
    """Return the part between the markers."""
    rows: Sequence[Row] = results["measurements"]
    parts = [
        where(results),
        "## Targets\n\ntensorferry over its lane, on one core.\n\n" + tables.ratios(all_ratios(rows)),
        METHOD,
        "![calls a second and latency of the tiny model](plots/serving.svg)",
    ]
    for name in TITLES:
        if any(row["workload"] == name for row in rows):
            parts.append(_model(rows, name))
    parts += [
        "![the larger models, and sizes of messages](plots/serving_models.svg)",
        "## Sizes of messages\n\nIdentity, 8 calls in flight, calls/s by the bytes each way.\n\n"
        + tables.sizes(rows),
        "## Open loop\n\nAt shares of the highest rate that each server reached in a closed loop of the round.\n\n"
        + tables.open_loop(rows),
        "![99th percentile of the latency against load](plots/serving_open.svg)",
        _trouble(results),
        NOT_MEASURED,
    ]
    return "\n\n".join(parts)


def where(results: Mapping[str, Any]) -> str:
    """Return the date, the machine and the versions."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    known = servers()
    measured = {known[row["server"]].peer for row in results["measurements"] if row.get("server") in known}
    peers = [
        words.split()[0].replace("==", " ") for name, words in machine["peers"].items() if name in measured
    ]
    rounds = f"{results['rounds']} round{'s' if results['rounds'] > 1 else ''}"
    return (
        f"{results['date']}, `{results['command']}`, {rounds} in {results['minutes']:g} minutes, "
        f"on {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, "
        f"Python {machine['python']}; {versions}" + (f"; {', '.join(peers)}" if peers else "") + "."
    )


def _model(rows: Sequence[Row], name: str) -> str:
    parts = [f"## {TITLES[name]}\n\n{WORKLOADS[name].meaning}. Unary calls/s.", tables.unary(rows, name)]
    if any(row["server"] == RAW and row["workload"] == name for row in rows):
        parts.append(tables.ceiling(rows, name))
    if any(row["workload"] == name and "stream" in row.get("pattern", "") for row in rows):
        parts += ["Over `ModelStreamInfer`, messages/s:", tables.streams(rows, name)]
    return "\n\n".join(parts)


def _trouble(results: Mapping[str, Any]) -> str:
    lines = [f"## About this run\n\n{tables.noise(results['measurements'])}"]
    if results["missing"]:
        lines.append(f"Not installed, so not measured: {', '.join(results['missing'])}.")
    return "\n\n".join([*lines, *failures(results)])


def failures(results: Mapping[str, Any]) -> list[str]:
    """Return a line for each measurement that failed."""
    lines = []
    for failure in results["failures"]:
        # Without the folders of this machine.
        reason = re.sub(r"(?:/[\w.@+-]+)+/", "", " ".join(failure["reason"].split()))[:200]
        lines.append(f"- Round {failure['round'] + 1}, {failure['server']} failed: {reason}")
    return lines


def main() -> None:
    """Write the page and the plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=cache_folder() / "results" / "results.json")
    parser.add_argument("--docs", type=Path, default=Path(__file__).resolve().parents[3] / "docs" / "results")
    arguments = parser.parse_args()
    if not arguments.results.exists():
        raise SystemExit(f"{arguments.results} is not there: run `make bench` first")
    results = json.loads(arguments.results.read_text())
    page = arguments.docs / "performance.md"
    arguments.docs.mkdir(parents=True, exist_ok=True)
    page.write_text(SECTION.replaced(page.read_text() if page.exists() else EMPTY_PAGE, generated(results)))
    for path in (page, *plots.write(arguments.docs / "plots", results["measurements"])):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
