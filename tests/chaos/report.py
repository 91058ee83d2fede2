"""Findings of the soak, as a record for programs and as tables for people."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median
from typing import Any

from chaos.account import Account, Answer
from chaos.watch import Sample

# Allowed growth of the last third over the first, as a factor, and in MiB, files and threads.
GROWTH, MEBIBYTES, FILES, THREADS = 1.05, 24, 16, 16
# Allowed latency of a quiet window, as a multiple of the first third's median, on a shared machine.
SLOWER = 3.0


@dataclass(frozen=True, slots=True)
class Window:
    """A period of time, and whether faults were injected in it."""

    begin: float
    end: float
    faults: bool


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile of sorted values; NaN without values."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def latencies(windows: Sequence[Window], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the latencies of the unary calls answered in each window."""
    ordered = sorted((one for one in answers if "stream" not in one.kind), key=lambda one: one.at)
    at = [one.at for one in ordered]
    rows = []
    for window in windows:
        took = sorted(
            one.took for one in ordered[bisect.bisect(at, window.begin) : bisect.bisect(at, window.end)]
        )
        seconds = window.end - window.begin
        rows.append(
            {
                "from_s": window.begin - windows[0].begin,
                "seconds": seconds,
                "faults": window.faults,
                "answers_per_s": len(took) / seconds,
                "p50_ms": percentile(took, 0.5) * 1e3,
                "p99_ms": percentile(took, 0.99) * 1e3,
            }
        )
    return rows


def growth(samples: Sequence[Sample], windows: Sequence[Window]) -> dict[str, dict[str, Any]]:
    """Return, for each role, the growth of its processes from the first to the last third without faults, and all slopes.

    The first window is left out, because processes grow to their size in it.
    """
    roles = list(dict.fromkeys(one.role for one in samples))
    return {role: _growth([one for one in samples if one.role == role], windows) for role in roles}


def _growth(samples: Sequence[Sample], windows: Sequence[Window]) -> dict[str, Any]:
    quiet = [window for window in windows if not window.faults]
    calm = [[one for one in samples if window.begin <= one.at <= window.end] for window in quiet]
    calm = [window for window in calm if window]
    calm = calm[1:] if len(calm) > 3 else calm
    third = max(1, len(calm) // 3)
    first = [one for window in calm[:third] for one in window]
    last = [one for window in calm[-third:] for one in window]
    found: dict[str, Any] = {}
    for name, unit in (("memory", 1 << 20), ("files", 1), ("threads", 1)):
        values = [(one.at, getattr(one, name) / unit) for window in calm for one in window]
        found[name] = {
            "first": median(getattr(one, name) / unit for one in first) if first else 0.0,
            "last": median(getattr(one, name) / unit for one in last) if last else 0.0,
            "per_minute": slope(values) * 60,
        }
    return found


def slope(values: Sequence[tuple[float, float]]) -> float:
    """Return the slope of least squares, per second."""
    return linear_regression(*zip(*values, strict=True)).slope if len({x for x, _ in values}) > 1 else 0.0


def verdicts(
    account: Account,
    grown: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    counters: Mapping[str, Mapping[str, tuple[int, int]]],
    wrong: Sequence[str],
    left: Sequence[str],
    *,
    long: bool,
) -> dict[str, bool]:
    """Return what must hold. Memory and latency count only if the soak was long enough to show a
    trend.
    """
    found = {
        "no call lost": not account.lost,
        "none doubled": not account.doubled,
        "none crossed": not account.crossed,
        "each ended in a way that is explained": not account.unexplained,
        "the servers' counters add up": all(
            accepted == ended for models in counters.values() for accepted, ended in models.values()
        ),
        "every process ended as it should": not wrong,
        "no process, port or file left behind": not left,
        "something was answered": bool(account.answers),
    }
    if long:
        memory, files, threads = (
            [(role[name]["first"], role[name]["last"]) for role in grown.values()]
            for name in ("memory", "files", "threads")
        )
        found["memory flat"] = all(last <= max(first * GROWTH, first + MEBIBYTES) for first, last in memory)
        found["files flat"] = all(last <= first + FILES for first, last in files)
        found["threads flat"] = all(last <= first + THREADS for first, last in threads)
        quiet = [row["p99_ms"] for row in rows if not row["faults"]]
        third = max(1, len(quiet) // 3)
        found["latency steady"] = median(quiet[-third:]) <= SLOWER * median(quiet[:third])
    return found


def markdown(record: Mapping[str, Any]) -> str:
    """Return the tables."""
    lines = [f"{record['date']}, `{record['command']}`: {record['versions']}, seed {record['seed']}.", ""]
    lines += ["| what must hold | holds |", "|---|---|"]
    lines += [f"| {what} | {'yes' if holds else '**no**'} |" for what, holds in record["verdicts"].items()]
    ledger = record["ledger"]
    states = sorted({state for states in ledger["states"].values() for state in states})
    lines += ["", f"{ledger['sent']} calls; {ledger['left']} left with callers that were killed.", ""]
    lines += [f"| calls | {' | '.join(states)} |", "|---" * (len(states) + 1) + "|"]
    for kind, by_state in sorted(ledger["states"].items()):
        lines.append(f"| {kind} | {' | '.join(str(by_state.get(state, 0)) for state in states)} |")
    lines += ["", "| fault | times |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in sorted(record["faults"].items())]
    lines += ["", "| server | model | accepted | ended |", "|---|---|---|---|"]
    for server, models in record["counters"].items():
        lines += [f"| {server} | {model} | {both[0]} | {both[1]} |" for model, both in models.items()]
    lines += [
        "",
        "| of the server that lived throughout | per process | first third | last third | per minute |",
        "|---|---|---|---|---|",
    ]
    for role, found in record["growth"].items():
        for name, unit in (("memory", "MiB (PSS)"), ("files", "open files"), ("threads", "threads")):
            one = found[name]
            lines.append(
                f"| {role} | {unit} | {one['first']:.1f} | {one['last']:.1f} | {one['per_minute']:+.2f} |"
            )
    lines += ["", "| from, s | faults | answers/s | p50, ms | p99, ms |", "|---|---|---|---|---|"]
    for row in record["windows"]:
        lines.append(
            f"| {row['from_s']:.0f} | {'yes' if row['faults'] else 'no'} | {row['answers_per_s']:.0f} | "
            f"{row['p50_ms']:.1f} | {row['p99_ms']:.1f} |"
        )
    return "\n".join(lines) + "\n"
