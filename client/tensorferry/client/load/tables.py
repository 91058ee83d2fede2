"""Text of the results of a load test: progress, the table, errors and comparisons."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.client.load.comparison import Difference
from tensorferry.client.load.results import PERCENTILES, Interval, StepResult
from tensorferry.client.load.steps import Step
from tensorferry.client.messages.printable import one_line

_LONGEST_MESSAGE = 200


def seconds_text(seconds: float | None) -> str:
    """Return a time with three digits and its unit; "-" for None."""
    if seconds is None:
        return "-"
    for limit, factor, unit in ((9.995e-4, 1e6, "µs"), (0.9995, 1e3, "ms")):
        if seconds < limit:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds)} s"


def _digits(value: float) -> str:
    if not value:
        return "0"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def number_text(value: float) -> str:
    """Return a rate or a count: whole from 100 on, otherwise with one digit behind the point."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def progress_line(step: Step, second: int, seconds: int | None, interval: Interval) -> str:
    """Return the line of one interval, which counts from 0, of `seconds` if that is known."""
    failed = f", {interval.failed} failed" if interval.failed else ""
    of = "" if seconds is None else f" of {seconds}"
    return (
        f"{step.label}, {second + 1}{of}: {number_text(interval.requests_per_second)} per second, "
        f"p50 {seconds_text(interval.p50_seconds)}, p99 {seconds_text(interval.p99_seconds)}{failed}"
    )


def table(results: Sequence[StepResult], rows: int) -> list[str]:
    """Return the lines of the table; `rows` is the rows of a request, for the column of rows per second."""
    closed = any(result.step.concurrency is not None for result in results)
    with_rows = rows > 1 or any(result.rows != result.answered for result in results)
    with_server = any(result.server is not None for result in results)
    head = ["in flight" if closed else "rate", "requests/s", *(["rows/s"] if with_rows else [])]
    head += [*(name for name, _ in PERCENTILES), "max", "failed"]
    head += ["queue", "compute", "batch"] if with_server else []
    lines = [tuple(head)]
    for result in results:
        step, latencies = result.step, result.latencies
        load = step.concurrency if closed else "trace" if step.rate is None else f"{step.rate:g}"
        line = [
            str(load),
            number_text(result.requests_per_second),
            *([number_text(result.rows_per_second)] if with_rows else []),
        ]
        line += [seconds_text(latencies.percentile(share)) for _, share in PERCENTILES]
        line += [seconds_text(latencies.most if result.answered else None), number_text(result.failed)]
        server = result.server
        if server is not None:
            batch = "-" if server.mean_batch_rows is None else f"{server.mean_batch_rows:.1f}"
            line += [seconds_text(server.queue_seconds), seconds_text(server.compute_seconds), batch]
        elif with_server:
            line += ["-", "-", "-"]
        lines.append(tuple(line))
    return _aligned(lines)


def errors_and_warnings(results: Sequence[StepResult]) -> list[str]:
    """Return a line for each error code of each step, and one for each kind of warning."""
    lines = []
    warned: dict[str, list[tuple[str, str]]] = {}
    for result in results:
        label = result.step.label
        for error in result.errors:
            message = plain(error.message) or "no message"
            lines.append(f"{label}: {error.count:,} × {error.code}, the first: {message}")
        for warning in result.warnings:
            warned.setdefault(warning.partition(":")[0], []).append((label, warning))
    for some in warned.values():
        last, text = some[-1]
        of_last = f", at {last}" if len(some) > 1 else ""
        lines.append(f"WARNING ({', '.join(label for label, _ in some)}){of_last}: {text}")
    return lines


def plain(message: str) -> str:
    """Return a server's text on one line, printable and cut."""
    text = one_line(message)
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def value_text(value: float, unit: str) -> str:
    """Return a figure of a comparison."""
    if unit == "s":
        return seconds_text(value)
    return f"{value:.1f}" if unit == "rows" else number_text(value)


def comparison_table(differences: Sequence[Difference], other_name: str) -> list[str]:
    """Return the lines that compare with the file `other_name`."""
    if not differences:
        return [f"nothing to compare: {other_name} has none of these loads"]
    lines = [("load", "figure", "other", "this", "change", "")]
    for one in differences:
        other, this = value_text(one.other, one.unit), value_text(one.this, one.unit)
        change = "-" if one.change is None else f"{one.change:+.1%}"
        caution = "within the spread of the intervals" if one.within_spread else ""
        lines.append((one.step.label, one.figure, other, this, change, caution))
    return [f"compared with {other_name}:", *_aligned(lines, left=(0, 1, 5))]


def _aligned(lines: Sequence[tuple[str, ...]], left: Sequence[int] = ()) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
