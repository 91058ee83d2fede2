"""Report of the measurements, and its section in docs/results/performance.md.

python -m gpu.report RESULTS.json [--docs]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sections import Section

from gpu.servers import DEFAULT, THROUGHPUT, VARIANTS
from gpu.workloads import Workload, workload_of
from serving.reporting.tables import markdown as table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results" / "performance.md"
SECTION = Section(
    "<!-- made by `make gpu-bench`: change benchmarks/gpu/report.py instead -->",
    "<!-- end of what `make gpu-bench` made -->",
)
_SAYS_SO = "**Not measured on a GPU.**"

Part = Mapping[str, Any]
_WARNINGS = 3


def report(results: Mapping[str, Any]) -> str:
    """Return all parts in Markdown."""
    parts = list(results["parts"].values())
    text = [_where(parts), _wanted(parts)]
    for part in parts:
        text += list(_of_part(part))
    return "\n\n".join(text)


def _where(parts: Sequence[Part]) -> str:
    lines = []
    for part in parts:
        machine = part["machine"]
        said = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        minutes = f", {part['minutes']:g} minutes" if "minutes" in part else ""
        lines.append(
            f"- **{_workload(part).title}**: {part['date']}, `{part['command']}`{minutes}, on {part['device']}"
            f" ({machine['processor']}, {machine['cores']} cores; {part['layout']}), Python {machine['python']}; {said}."
        )
    if any(part["small"] for part in parts):
        lines.insert(
            0,
            f"{_SAYS_SO} These are small models on the CPU: they show that the harness works.\n",
        )
    lines += [
        f"\n**{part['workload']} did not run to its end:** {part['failure']}"
        for part in parts
        if "failure" in part
    ]
    return "\n".join(lines)


def _wanted(parts: Sequence[Part]) -> str:
    rows = []
    for part in parts:
        workload = _workload(part)
        bound = f"{workload.bound * 1e3:.0f} ms"
        rows += [
            _line(
                part,
                f"{workload.name}: server at saturation ÷ bare IO-binding loop",
                workload.saturation,
                saturation(part, fastest(part)),
            ),
            _line(
                part,
                f"{workload.name}: open loop, p99 within {bound}, ÷ closed loop (published systems: {workload.published:g})",
                workload.latency_bounded,
                latency_bounded(part, DEFAULT.name),
            ),
        ]
    return table(["figure", "wanted on a GPU", "seen: median (min–max)", "met"], rows)


def _line(part: Part, name: str, wanted: float, seen: Sequence[float]) -> list[str]:
    met = "–" if part["small"] or not seen else "yes" if median(seen) >= wanted else "no"
    return [name, f"≥ {wanted:g}", _spread(seen), met]


def _spread(seen: Sequence[float]) -> str:
    if not seen:
        return "–"
    middle = f"{median(seen):.2f}"
    return f"{middle} ({min(seen):.2f}–{max(seen):.2f})" if len(seen) > 1 else middle


def ceiling(part: Part, number: int) -> float:
    """Return the bare loop's best rate in a round, at any size, with or without copies; 0 without one."""
    return max((row["rate"] for row in part["loop"] if row["round"] == number), default=0.0)


def saturation(part: Part, variant: str = DEFAULT.name) -> list[float]:
    """Return the Offline rate relative to the bare loop's best, round by round."""
    return [
        row["rate"] / ceiling(part, row["round"])
        for row in part["offline"]
        if row["variant"] == variant and ceiling(part, row["round"])
    ]


def fastest(part: Part) -> str:
    """Return the faster server offline of the two default ones, with batches for the bound or for
    throughput.
    """
    return max((DEFAULT.name, THROUGHPUT.name), key=lambda name: offline_rate(part, name))


def latency_bounded(part: Part, variant: str) -> list[float]:
    """Return the confirmed Server rate relative to the faster server's median Offline rate; none if no
    rate met the bound.
    """
    offline, peak = offline_rate(part, fastest(part)), part["peaks"].get(variant)
    return [peak["rate"] / offline] if peak and offline else []


def offline_rate(part: Part, variant: str) -> float:
    """Return the median of the rounds; 0 if it was not measured."""
    rates = [row["rate"] for row in part["offline"] if row["variant"] == variant]
    return median(rates) if rates else 0.0


def _of_part(part: Part) -> Iterator[str]:
    workload = _workload(part)
    yield f"### {workload.title}"
    if part["loop"]:
        yield f"The bare loop, rows/s (ms of a batch); for the bound the servers form batches of up to {part.get('max_batch_size', '–')}.\n\n{_loop(part)}"
    if part["offline"]:
        yield (
            "Closed loop over gRPC, one row a request; medians. *Device* is the share of the time in which a batch "
            "was run, *÷ loop* a batch's time beside the bare loop's, of the next smaller size in proportion (on a GPU with copies), "
            "*join* and *answer* what the host does before and after, *cores* what the server used, with its busiest "
            f"threads; *load* the share of its core that the load generator used.\n\n{_offline(part)}"
        )
    if part["server"]:
        yield f"Open loop, every run; those count that confirm a rate.\n\n{_server(part)}"
    for name, lines in part["warnings"].items():
        for line in lines[:_WARNINGS]:
            yield f"- {name} warned: {_message(line)}"
    skipped = [f"{name} ({why})" for name, why in part["skipped"].items()]
    if skipped:
        yield f"Not measured: {', '.join(skipped)}."


def _message(line: str) -> str:
    """Return the message of a log line, without the folders of the machine."""
    try:
        said = json.loads(line)["message"]
    except (ValueError, KeyError, TypeError):
        said = line
    return re.sub(r"(?:/[\w.@+-]+)+/", "", str(said))


def _loop(part: Part) -> str:
    sizes = sorted({row["rows"] for row in part["loop"]})
    rows = []
    for copies, name in ((False, "on the device"), (True, "with copies to it and back")):
        cells = [_cell(part, size, copies) for size in sizes]
        if any(cells):
            rows.append([name, *cells])
    return table(["rows of a batch", *map(str, sizes)], rows)


def _cell(part: Part, size: int, copies: bool) -> str:
    found = [
        row for row in part["loop"] if row["rows"] == size and row["copies"] == copies and row["round"] >= 0
    ]
    if not found:
        return ""
    rate, seconds = (median(row[name] for row in found) for name in ("rate", "batch_seconds"))
    return f"{rate:,.0f} ({seconds * 1e3:.2f})"


def _bare_seconds(part: Part, rows: float) -> float:
    """Return the bare loop's time of a batch of about `rows` rows, with copies if measured."""
    copied = any(row["copies"] for row in part["loop"])
    times: dict[int, list[float]] = {}
    for row in part["loop"]:
        if row["copies"] == copied and row["round"] >= 0:
            times.setdefault(row["rows"], []).append(row["batch_seconds"])
    below = max((size for size in times if size <= rows), default=min(times))
    return median(times[below]) * max(1.0, rows / below)


def _middle(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return median(float(run["account"][name]) for run in runs)


def _offline(part: Part) -> str:
    lines = []
    for variant in VARIANTS:
        runs = [row for row in part["offline"] if row["variant"] == variant.name]
        if not runs:
            continue
        rows = _middle(runs, "rows")
        threads = " ".join(f"{each:.2f}" for each in runs[len(runs) // 2]["account"]["threads"])
        lines.append(
            [
                f"{variant.name}: {variant.meaning}",
                f"{offline_rate(part, variant.name):,.0f}",
                _spread(saturation(part, variant.name)),
                f"{rows:.1f}",
                f"{_middle(runs, 'busy'):.0%}",
                f"{_middle(runs, 'run') / _bare_seconds(part, rows):.2f}",
                f"{_middle(runs, 'before') * 1e3:.2f}",
                f"{_middle(runs, 'after') * 1e3:.2f}",
                f"{_middle(runs, 'cpu') * 1e6:.0f}",
                f"{_middle(runs, 'cores'):.2f} ({threads})",
                f"{median(run['busiest'] for run in runs):.0%}",
            ]
        )
    header = ["server", "rows/s", "÷ bare loop", "rows a batch", "device", "÷ loop", "join ms", "answer ms"]
    return table([*header, "CPU µs a row", "cores (threads)", "load"], lines)


def _server(part: Part) -> str:
    lines = [
        [
            row["variant"] + (", confirmed" if row["confirms"] and row["met"] else ""),
            f"{row['target']:,.0f}",
            f"{row['rate']:,.0f}",
            f"{row['p50'] * 1e3:.1f}",
            f"{row['p99'] * 1e3:.1f}",
            f"{row['account']['rows']:.1f}",
            f"{row['account']['busy']:.0%}",
            ("yes" if row["met"] else "no") + (f", {row['errors']} errors" if row["errors"] else ""),
        ]
        for row in sorted(part["server"], key=lambda row: row["variant"])
    ]
    header = ["server", "asked/s", "done/s", "p50 ms", "p99 ms", "rows a batch", "device", "met"]
    return table(header, lines)


def _workload(part: Part) -> Workload:
    return workload_of(part["workload"], small=part["small"])


def write(page: Path, text: str) -> None:
    """Write the section, except for figures of a CPU."""
    if _SAYS_SO in text:
        print(f"not measured on a GPU: {page} is left as it is")
        return
    page.write_text(SECTION.replaced(page.read_text(), text))
    print(f"wrote {page}")


def main() -> None:
    """Print the report of a file of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--docs", action="store_true", help="write it into docs/results/performance.md")
    arguments = parser.parse_args()
    text = report(json.loads(arguments.results.read_text()))
    print(text)
    if arguments.docs:
        write(DOCS, text)


if __name__ == "__main__":
    main()
