"""Make the generated part of docs/results/python_models.md from the results of python_models.run.

python -m python_models.report [--results FILE] [--page FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sections import Section

from python_models import images, plan, steps, text
from python_models.plan import FUNCTIONS
from python_models.steps import BLS, OURS, STEP, TWO, WITHOUT, differences
from serving.plan import UNARY
from serving.reporting import tables
from serving.reporting.ratios import Figures, Ratio, divided, figures
from serving.reporting.report import failures, where
from serving.reporting.tables import markdown, number
from serving.run import cache_folder
from serving.servers import BENTOML, LANE, LITSERVE, MAX_BATCH_SIZE, MOSEC, PYTRITON

Row = Mapping[str, Any]

SECTION = Section(
    "<!-- made by `make bench-python`: change benchmarks/python_models/report.py instead -->",
    "<!-- end of what `make bench-python` made -->",
)
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "python_models.md"
_FASTER = {LITSERVE: 3, BENTOML: 3, PYTRITON: 2, MOSEC: None}
_NOISY_CORES = 0.3
# Microseconds to which the cost of a step can be measured. In ratios a smaller cost counts as this.
_RESOLUTION = {"batch_us": 1.0, "request_us": 0.1}
_UNITS = {"batch_us": f"batch of {MAX_BATCH_SIZE} rows", "request_us": f"request, {MAX_BATCH_SIZE} in flight"}
_WANTED = {"batch_us": 40, "request_us": 1.5}
_CHEAPER = 5

METHOD = f"""## Method

- Ratios are taken within a round, and the median over the rounds is shown. Every other round runs in reverse order.
  The load generator is that of [performance](performance.md#method). Answers are checked before each load.
- Functions, steps and text: the server, with all its processes and threads, has one core, the load generator another.
  Images: both share all cores.
- Functions: every server runs the same numpy function in batches of at most {MAX_BATCH_SIZE}. LitServe, mosec and PyTriton have a
  window of 2 ms, BentoML its adaptive dispatcher, tensorferry its default options. LitServe and BentoML get base64 in
  JSON, mosec msgpack, over HTTP/1.1; the others gRPC.
- Steps: two ONNX models of 64 × 64 weights, alone and with Python steps between them that return their input. The
  cost of a step is the difference within one server, of loads that alternate: of the median latency of one
  call of {MAX_BATCH_SIZE} rows, and of the processor time per call with {MAX_BATCH_SIZE} calls of one row in flight. Triton is the server in
  PyTriton's wheel. It has no ONNX Runtime backend, so its Python backend runs the two models, with and without steps.
  Its BLS is a Python model that calls the two models once for a batch; its cost is the difference to the ensemble without
  a step. BLS forms batches once, and an ensemble once for each model, so a single row can cost less with BLS.
- Images: {images.IN_FLIGHT} calls in flight, each with a JPEG file of 640 × 480 pixels, which Pillow decodes and resizes to
  224 × 224 before a small ResNet. "Busy" is the share of time in which the model runs, by its statistics.
- Text: all-MiniLM-L6-v2 and its tokenizer, {text.IN_FLIGHT} calls in flight. The encoder alone gets the tokens of the same texts.
  Mixed texts have {text.SHORTEST} to {text.LONGEST} tokens, evenly distributed. In arrival order a batch is padded to its longest text.
- Calls of {", ".join(map(str, text.LARGE[:-1]))} and {text.LARGE[-1]:,} texts have mixed lengths, and one is in flight."""


def all_ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Return the table, in order."""
    return [*_functions(rows), *_steps(rows), *_text(rows)]


def _of(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def _functions(rows: Sequence[Row]) -> Iterator[Ratio]:
    of_functions = _of(rows, plan.PART)
    for function in FUNCTIONS:
        for callers in plan.IN_FLIGHT[1:]:
            ours, *peers = (
                figures(of_functions, server, function.name, UNARY, callers) for server in (LANE, *_FASTER)
            )
            for (peer, wanted), theirs in zip(_FASTER.items(), peers, strict=True):
                name = f"calls/s, function `{function.name}`, {callers} in flight"
                yield Ratio(name, peer, wanted, divided(ours, theirs))


def _steps(rows: Sequence[Row]) -> Iterator[Ratio]:
    for field, unit in _UNITS.items():
        ours = differences(rows, OURS, STEP, field)
        name = f"cost of an empty step, {unit}"
        yield Ratio(name, "1 µs", _WANTED[field], list(ours.values()), at_most=True)
        told = {round: max(cost, _RESOLUTION[field]) for round, cost in ours.items()}
        for server in steps.PEERS:
            theirs = differences(rows, server, STEP, field)
            yield Ratio(f"{server}'s ensemble: {name}", "tensorferry's", _CHEAPER, divided(theirs, told))
        if field == "batch_us":
            for server in steps.PEERS:
                theirs = differences(rows, server, BLS, field)
                yield Ratio(f"{server}'s BLS: {name}", "tensorferry's", _CHEAPER, divided(theirs, told))


def _text(rows: Sequence[Row]) -> Iterator[Ratio]:
    def rates(kind: str | int, model: str) -> Figures:
        return {
            row["round"]: row["rate"]
            for row in _of(rows, text.PART)
            if (row["lengths"], row["model"]) == (kind, model)
        }

    equal = divided(rates(text.EQUAL, text.EMBED), rates(text.EQUAL, text.ENCODER))
    yield Ratio("texts/s, tokenizer and encoder", "the encoder alone", 0.93, equal)
    mixed = divided(rates(text.MIXED, text.EMBED), rates(text.MIXED, text.ARRIVAL))
    yield Ratio("texts/s, mixed lengths, batches by length", "arrival order", 1.25, mixed)
    for encoding, wanted in zip(text.ENCODINGS, (0.95, 0.8), strict=True):
        over = divided(rates(text.ENDPOINT, encoding), rates(text.ENDPOINT, text.GRPC))
        yield Ratio(f"texts/s, /v1/embeddings, {encoding}", "the same call over gRPC", wanted, over)
    for count, wanted in zip(text.LARGE, (1.2, 1.3, 1.3), strict=True):
        sorted_rows = divided(rates(count, text.EMBED), rates(count, text.ARRIVAL))
        yield Ratio(
            f"texts/s, calls of {count} texts, sorted by length", "arrival order", wanted, sorted_rows
        )


def generated(results: Mapping[str, Any]) -> str:
    """Return the part between the markers."""
    rows: Sequence[Row] = results["measurements"]
    parts = [where(results), "## Targets\n\n" + tables.ratios(all_ratios(rows)), METHOD]
    for function in FUNCTIONS:
        some = [row for row in rows if row.get("workload") == function.name]
        if some:
            parts.append(
                f"## Function `{function.name}`\n\n{function.meaning}. Unary calls/s.\n\n"
                + tables.unary(some, function.name)
            )
    for part, title, table in (
        (steps.PART, "An empty step", _step_table),
        (images.PART, "Images", _image_table),
        (text.PART, "Text", _text_table),
    ):
        if some := _of(rows, part):
            parts.append(f"## {title}\n\n{table(some)}")
    return "\n\n".join([*parts, _about(results)])


_MODELS = {
    WITHOUT: "two models",
    STEP: "with a step between",
    TWO: "with two steps between",
    BLS: "two models called by Python (BLS)",
}


def _step_table(rows: Sequence[Row]) -> str:
    lines = []
    for server in steps.SERVERS:
        for model in steps.models_of(server):
            some = [row for row in rows if (row["server"], row["model"]) == (server, model)]
            more = [list(differences(rows, server, model, field).values()) for field in _UNITS]
            if some:
                told = [tables.ABSENT if model == WITHOUT else f"{median(costs):+.2f}" for costs in more]
                lines.append(
                    [f"{server}, {_MODELS[model]}", *_medians(some, batch_us=1, request_us=2), *told]
                )
    header = ["server", *(f"µs a {unit}" for unit in _UNITS.values()), "µs more a batch", "µs more a request"]
    return markdown(header, lines)


def _image_table(rows: Sequence[Row]) -> str:
    def rates(processes: int) -> Figures:
        return {row["round"]: row["rate"] for row in rows if row["processes"] == processes}

    lines = []
    for processes in (*images.PROCESSES, images.NO_DECODING):
        some = [row for row in rows if row["processes"] == processes]
        gains = divided(rates(processes), rates(images.PROCESSES[0]))
        if some:
            name = (
                f"{processes} process{'es' if processes > 1 else ''}"
                if processes
                else "ready pixels, no decoding"
            )
            gain = f"{median(gains):.2f}" if gains else tables.ABSENT
            busy = f"{median(row['busy'] for row in some):.0%}"
            lines.append(
                [
                    name,
                    *_medians(some, rate=0),
                    gain,
                    busy,
                    *_medians(some, server_cores=2, p50_ms=1, p99_ms=1),
                ]
            )
    header = ["decoding in", "images/s", "÷ 1 process", "model busy", "cores used", "p50 ms", "p99 ms"]
    return markdown(header, lines)


def _text_table(rows: Sequence[Row]) -> str:
    names: dict[tuple[str | int, str], str] = {
        (text.EQUAL, text.ENCODER): f"{text.EQUAL_TOKENS} tokens each, encoder alone",
        (text.EQUAL, text.EMBED): f"{text.EQUAL_TOKENS} tokens each, tokenizer and encoder",
        (text.MIXED, text.EMBED): "mixed lengths, batches by length",
        (text.MIXED, text.ARRIVAL): "mixed lengths, arrival order",
    }
    for name in (text.GRPC, *text.ENCODINGS):
        over = "gRPC" if name == text.GRPC else f"/v1/embeddings, {name}"
        names[text.ENDPOINT, name] = f"{text.EQUAL_TOKENS} tokens each, over {over}"
    for count in text.LARGE:
        names[count, text.EMBED] = f"mixed lengths, {count} a call, sorted by length"
        names[count, text.ARRIVAL] = f"mixed lengths, {count} a call, arrival order"
    lines = []
    for (kind, model), name in names.items():
        some = [row for row in rows if (row["lengths"], row["model"]) == (kind, model)]
        if some:
            lines.append([name, *_medians(some, rate=1, p50_ms=0, p99_ms=0, cpu_us_per_answer=0)])
    return markdown(["texts", "texts/s", "p50 ms", "p99 ms", "CPU µs per text"], lines)


def _medians(rows: Sequence[Row], **digits: int) -> list[str]:
    return [number(median(row[field] for row in rows), places) for field, places in digits.items()]


def _about(results: Mapping[str, Any]) -> str:
    rows = results["measurements"]
    noisy = sum(row["other_cores"] > _NOISY_CORES for row in rows if row["part"] != images.PART)
    lines = [
        f"## About this run\n\nIn {noisy} of {len(rows)} measurements other processes, or other machines of the host, took "
        f"more than {_NOISY_CORES:g} of a core."
    ]
    lines += [f"- Not measured: {what}, because {reason}." for what, reason in results["missing"].items()]
    return "\n\n".join([*lines, *failures(results)])


def results_file(cache: Path, quick: bool) -> Path:
    """Return the file of the results."""
    return cache / "results" / f"python_models{'-quick' if quick else ''}.json"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=results_file(cache_folder(), quick=False))
    parser.add_argument("--page", type=Path, default=_PAGE)
    arguments = parser.parse_args()
    if not arguments.results.exists():
        raise SystemExit(f"{arguments.results} is not there: run `make bench-python` first")
    page = SECTION.replaced(arguments.page.read_text(), generated(json.loads(arguments.results.read_text())))
    arguments.page.write_text(page)
    print(f"wrote {arguments.page}")


if __name__ == "__main__":
    main()
