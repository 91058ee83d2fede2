"""Text of the results of a load test: progress, the table, errors and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tensorferry.client.load.result_file import PERCENTILES, Difference, Document, label_of
from tensorferry.client.load.results import Interval
from tensorferry.client.load.steps import Step
from tensorferry.client.messages.printable import aligned, one_line

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
        f"{step.label}, {second + 1}{of}: {number_text(interval.answered / interval.seconds)} per second, "
        f"p50 {seconds_text(interval.p50_seconds)}, p99 {seconds_text(interval.p99_seconds)}{failed}"
    )


def table(contents: Document) -> list[str]:
    """Return the lines of the table."""
    steps = contents["steps"]
    load = "in flight" if any(step["concurrency"] is not None for step in steps) else "rate"
    with_rows = contents["rows"] > 1 or any(step["rows"] != step["answered"] for step in steps)
    with_server = any(step["server"] is not None for step in steps)
    lines = []
    for step in steps:
        rate = "trace" if step["rate"] is None else f"{step['rate']:g}"
        cells = {
            load: str(step["concurrency"] or rate),
            "requests/s": number_text(step["requests_per_second"]),
        }
        if with_rows:
            cells["rows/s"] = number_text(step["rows_per_second"])
        times = step["latency_seconds"]
        cells |= {name: seconds_text(times[name]) for name in (*PERCENTILES, "max")}
        cells["failed"] = number_text(step["failed"])
        if with_server:
            side = step["server"] or {}
            batch = side.get("mean_batch_rows")
            cells |= {name: seconds_text(side.get(f"{name}_seconds")) for name in ("queue", "compute")}
            cells["batch"] = "-" if batch is None else f"{batch:.1f}"
        lines.append(cells)
    return aligned([tuple(lines[0]), *(tuple(cells.values()) for cells in lines)])


def errors_and_warnings(contents: Document) -> list[str]:
    """Return a line for each error code of each step, and one for each kind of warning."""
    lines = []
    warned: dict[str, list[tuple[str, str]]] = {}
    for step in contents["steps"]:
        label = label_of(step)
        for error in step["errors"]:
            message = plain(error["message"]) or "no message"
            lines.append(f"{label}: {error['count']:,} × {error['code']}, the first: {message}")
        for warning in step["warnings"]:
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


# Texts of figures by their unit.
_TEXTS: Mapping[str, Callable[[float], str]] = {"s": seconds_text, "rows": "{:.1f}".format}


def comparison_table(differences: Sequence[Difference], other_name: str) -> list[str]:
    """Return the lines that compare with the file `other_name`."""
    if not differences:
        return [f"nothing to compare: {other_name} has none of these loads"]
    lines = [("load", "figure", "other", "this", "change", "")]
    for one in differences:
        text = _TEXTS.get(one.unit, number_text)
        change = "-" if one.change is None else f"{one.change:+.1%}"
        caution = "within the spread of the intervals" if one.within_spread else ""
        lines.append((one.step, one.figure, text(one.other), text(one.this), change, caution))
    return [f"compared with {other_name}:", *aligned(lines, left=(0, 1, 5))]
