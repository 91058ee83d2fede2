"""Tables of the page in Markdown, with medians over the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from serving.plan import ONE_STREAM, OPEN, RAW, SHARES, SIZES_IN_FLIGHT, STREAMS, UNARY
from serving.reporting.ratios import Ratio, Row, seen_text, wanted_text
from serving.workloads import SIZES

UNARY_IN_FLIGHT = (1, 8, 32, 128, 256)
NOISY_CORES = 0.3
ABSENT = "–"


def middle(
    rows: Sequence[Row],
    server: str,
    workload: str,
    pattern: str,
    in_flight: int,
    field: str,
    share: float = 0.0,
) -> float | None:
    """Return the median of a figure over the rounds, or None if it was not measured."""
    wanted = (server, workload, pattern, in_flight, share)
    values = [
        float(row[field])
        for row in rows
        if row["server"] != RAW
        and (row["server"], row["workload"], row["pattern"], row["in_flight"], row["share"]) == wanted
    ]
    return median(values) if values else None


def number(value: float | None, digits: int = 0) -> str:
    """Format a number with commas; None is a dash."""
    return ABSENT if value is None else f"{value:,.{digits}f}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a table whose first column is text and whose others are figures."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def ratios(everything: Sequence[Ratio]) -> str:
    """Return the required ratios, with targets and results."""
    lines = [
        [f"{ratio.name} ÷ {ratio.over}", wanted_text(ratio), seen_text(ratio), ratio.verdict]
        for ratio in everything
    ]
    return markdown(["figure", "wanted", "seen: median (min–max)", "met"], lines)


def _names(rows: Sequence[Row], workload: str, pattern: str) -> list[str]:
    """Return the servers with such a measurement, the fastest at 32 in flight first."""
    names = {
        row["server"]
        for row in rows
        if row["server"] != RAW and (row["workload"], row["pattern"]) == (workload, pattern)
    }
    return sorted(names, key=lambda name: -(middle(rows, name, workload, pattern, 32, "rate") or 0))


def unary(rows: Sequence[Row], workload: str) -> str:
    """Return calls per second, latencies, CPU time, batches and memory of each server."""
    measured = {
        row["in_flight"] for row in rows if row["workload"] == workload and row.get("pattern") == UNARY
    }
    columns = [callers for callers in UNARY_IN_FLIGHT if callers in measured]
    lines = []
    for name in _names(rows, workload, UNARY):

        def of(callers: int, field: str, name: str = name) -> float | None:
            return middle(rows, name, workload, UNARY, callers, field)

        mean_rows = of(32, "mean_rows")
        lines.append(
            [
                name,
                *(number(of(callers, "rate")) for callers in columns),
                *(
                    f"{number(of(callers, 'p50_ms'), 2)} / {number(of(callers, 'p99_ms'), 2)}"
                    for callers in (1, 32)
                ),
                number(of(32, "cpu_us_per_answer")),
                number(mean_rows, 1) if mean_rows else ABSENT,
                number(of(32, "memory_mib")),
                number(of(32, "start_seconds"), 1),
            ]
        )
    header = [
        "server", *(f"{callers} in flight" for callers in columns), "p50 / p99 ms at 1", "at 32",
        "CPU µs per call at 32", "mean batch at 32", "memory MiB", "start s",
    ]  # fmt: skip
    return markdown(header, lines)


def ceiling(rows: Sequence[Row], workload: str) -> str:
    """Return one line: raw ONNX Runtime by batch size."""
    raw = [row for row in rows if row["server"] == RAW and row["workload"] == workload]
    sizes = sorted({row["rows"] for row in raw})
    figures = (
        f"{median(row['rate'] for row in raw if row['rows'] == size):,.0f} in batches of {size}"
        for size in sizes
    )
    return "Raw ONNX Runtime in a loop on the same core, rows/s: " + ", ".join(figures) + "."


def streams(rows: Sequence[Row], workload: str) -> str:
    """Return messages per second, over one stream and over one stream for each request in flight."""
    shown = [(pattern, callers) for pattern in (ONE_STREAM, STREAMS) for callers in (32, 128)]
    shown = [(p, c) for p, c in shown if any(_is(row, workload, p, c) for row in rows)]
    names = dict.fromkeys([*_names(rows, workload, ONE_STREAM), *_names(rows, workload, STREAMS)])
    lines = [
        [
            name,
            *(number(middle(rows, name, workload, pattern, callers, "rate")) for pattern, callers in shown),
        ]
        for name in names
    ]
    header = [
        f"one stream, {callers} in flight" if pattern == ONE_STREAM else f"{callers} streams"
        for pattern, callers in shown
    ]
    return markdown(["server", *header], lines)


def _is(row: Row, workload: str, pattern: str, in_flight: int) -> bool:
    return (row["workload"], row.get("pattern"), row.get("in_flight")) == (workload, pattern, in_flight)


def sizes(rows: Sequence[Row]) -> str:
    """Return calls per second by message size."""
    names = _names(rows, SIZES[0].name, UNARY)
    lines = [
        [name, *(number(middle(rows, name, size.name, UNARY, SIZES_IN_FLIGHT, "rate")) for size in SIZES)]
        for name in names
    ]
    return markdown(["server", *(size.name for size in SIZES)], lines)


def open_loop(rows: Sequence[Row]) -> str:
    """Return latencies under independent arrivals, at shares of each server's capacity."""
    lines = []
    for workload in ("tiny", "mlp", "transformer"):
        for name in _names(rows, workload, OPEN):
            cells = [name, workload]
            for share in SHARES:
                figures = [
                    middle(rows, name, workload, OPEN, 0, f, share) for f in ("offered", "p50_ms", "p99_ms")
                ]
                cells.append(
                    f"{number(figures[0])}/s: {number(figures[1], 2)} / {number(figures[2], 2)}"
                    if figures[0] is not None
                    else ABSENT
                )
            lines.append(cells)
    return markdown(["server", "model", *(f"{share:.0%}: p50 / p99 ms" for share in SHARES)], lines)


def noise(rows: Sequence[Row]) -> str:
    """Return how quiet the machine was, and how many requests failed."""
    loads = [row for row in rows if row["server"] != RAW]
    noisy = sum(row["other_cores"] > NOISY_CORES for row in loads)
    answers, errors = (sum(row[field] for row in loads) for field in ("answers", "errors"))
    unanswered = sum(row["unanswered"] for row in loads)
    return (
        f"{len(loads)} measurements, {answers:,} answers, {errors:,} errors, {unanswered:,} unanswered. "
        f"In {noisy} of the measurements other processes, or other machines of the host, "
        f"took more than {NOISY_CORES:g} of a core."
    )
