"""Make the generated part of docs/results/real_models.md from the results of real_models.run.

python -m real_models.report [--results FILE] [--page FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sections import Section

from real_models.rates import DEFAULT, IN_FLIGHT, SIZES, beside_best
from serving.reporting.report import failures, where
from serving.reporting.tables import ABSENT, markdown
from serving.run import cache_folder

Row = Mapping[str, Any]

SECTION = Section(
    "<!-- made by `make real-models`: change benchmarks/real_models/report.py instead -->",
    "<!-- end of what `make real-models` made -->",
)
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "real_models.md"
_TITLES = {"rate": "requests/s", "cpu_us_per_answer": "processor time", "p50_ms": "p50"}
_COLUMNS = [
    *((figure, in_flight) for figure in ("rate", "cpu_us_per_answer") for in_flight in IN_FLIGHT[::-1]),
    ("p50_ms", IN_FLIGHT[-1]),
]
_LEAST_RATE, _MOST_P50 = 0.97, 1.05


def results_file(cache: Path) -> Path:
    """Return the file of results."""
    return cache / "results" / "real_models.json"


def generated(results: Mapping[str, Any]) -> str:
    """Return the part between the marks; without rounds it has no rates."""
    parts = [
        where(results),
        f"## Verdicts and answers\n\n{_answered(results['models'])}\n\n{table(results)}",
        f"## Time to ready\n\nSeconds, on all cores.\n\n{_ready(results)}",
    ]
    if results["measurements"]:
        parts += [
            f"## Default batch size beside the best\n\n{_beside(results)}",
            f"## Requests a second\n\nMedians, and the rows of a full batch that were learned.\n\n{_rates(results)}",
        ]
    if results["open"]:
        parts.append(f"## Open loop\n\n{_open(results['open'])}")
    return "\n\n".join([*parts, *failures(results)])


def _answered(models: Sequence[Row]) -> str:
    wrong, answers = sum(row["wrong"] for row in models), sum(row["right"] + row["wrong"] for row in models)
    return f"{wrong} of {answers:,} answers are wrong."


def table(results: Mapping[str, Any]) -> str:
    """Return verdicts and answers of all models."""
    lines = [
        [
            row["name"],
            f"{row['package']} {row['version']}".strip() or ABSENT,
            f"`{row['file']}`",
            f"{row['bytes'] / 1e6:.1f}",
            "; ".join(f"{name} {list(shape)}" for name, shape in row["inputs"].items()).replace("'", ""),
            row["verdict"],
            row["why"],
            f"{row['right']}",
            f"{row['wrong']}",
            f"{row['mean_rows']:.1f}",
        ]
        for row in results["models"]
    ]
    header = ["model", "package", "file", "MB", "inputs", "verdict", "why", "right", "wrong", "rows a batch"]
    return markdown(header, lines)


def _ready(results: Mapping[str, Any]) -> str:
    fields, models = ("session_seconds", "first_seconds", "again_seconds"), results["models"]
    lines = [[row["name"], *(f"{row[field]:.2f}" for field in fields)] for row in models]
    sums = [f"{sum(row[field] for row in models):.1f}" for field in fields]
    lines.append(["all", *sums])
    if together := results.get("together"):
        lines.append(["all in one server", ABSENT, *(f"{together[field]:.1f}" for field in fields[1:])])
    return markdown(["model", "session alone", "first start", "again"], lines)


def _of(results: Mapping[str, Any], model: str, in_flight: int) -> Sequence[Row]:
    rows = results["measurements"]
    return [row for row in rows if (row["model"], row["in_flight"]) == (model, in_flight)]


def _names(results: Mapping[str, Any]) -> Sequence[str]:
    return list(dict.fromkeys(row["model"] for row in results["measurements"]))


def _beside(results: Mapping[str, Any]) -> str:
    lines = []
    for name in _names(results):
        line = [name]
        for figure, in_flight in _COLUMNS:
            found = beside_best(_of(results, name, in_flight), figure)
            if figure == "cpu_us_per_answer":
                found = [1 / each for each in found]
            met = median(found) <= _MOST_P50 if figure == "p50_ms" else median(found) >= _LEAST_RATE
            line.append(f"{median(found):.2f} ({min(found):.2f}–{max(found):.2f}){'' if met else ' *'}")
        lines.append(line)
    header = ["model", *(f"{_TITLES[figure]} at {in_flight}" for figure, in_flight in _COLUMNS)]
    return markdown(header, lines)


def _rates(results: Mapping[str, Any]) -> str:
    lines = []
    for name in _names(results):
        for in_flight in IN_FLIGHT[::-1]:
            rows = _of(results, name, in_flight)
            by_size = {
                size: [row["rate"] for row in rows if row["size"] == size] for size in (DEFAULT, *SIZES)
            }
            learned = sorted({row["full_rows"] for row in rows if row["size"] == DEFAULT})
            lines.append(
                [
                    name,
                    f"{in_flight}",
                    *(f"{median(found):,.1f}" if found else ABSENT for found in by_size.values()),
                    ", ".join(map(str, learned)),
                ]
            )
    header = ["model", "in flight", "default", *(f"at most {size}" for size in SIZES), "full batch"]
    return markdown(header, lines)


def _open(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["model"],
            f"{row['best']:.1f}",
            f"{row['rate']:.1f}",
            f"{row['served']:.2f}",
            f"{row['p50_ms']:.0f} / {row['p99_ms']:.0f}",
        ]
        for row in rows
    ]
    return markdown(["model", "best size, requests/s", "served", "share", "p50 / p99 ms"], lines)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=results_file(cache_folder()))
    parser.add_argument("--page", type=Path, default=_PAGE)
    arguments = parser.parse_args()
    if not arguments.results.exists():
        raise SystemExit(f"{arguments.results} is not there: run `make real-models` first")
    text = generated(json.loads(arguments.results.read_text()))
    arguments.page.write_text(SECTION.replaced(arguments.page.read_text(), text))
    print(f"wrote {arguments.page}")


if __name__ == "__main__":
    main()
