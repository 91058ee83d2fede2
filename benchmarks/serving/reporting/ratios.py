"""Required ratios: medians of ratios within one round.

Each ratio has its target. A round counts if both of its figures were measured in it; figures of
different rounds are never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from serving.plan import ONE_STREAM, OPEN, RAW, SIZES_IN_FLIGHT, STREAMS, UNARY
from serving.servers import (
    BENTOML,
    ECHO,
    ECHO_STREAMS,
    HTTP,
    LANE,
    LITSERVE,
    MAX_BATCH_SIZE,
    MOSEC,
    SLOW_PEERS,
    TRITON,
)

Row = Mapping[str, Any]
Figures = Mapping[int, float]
"""A figure by the number of its round."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One line of the table; `at_most` reverses the target, None is no target. It has no rounds if nothing was measured."""

    name: str
    over: str
    wanted: float | None
    values: Sequence[float]
    at_most: bool = False

    @property
    def seen(self) -> float | None:
        """Return the median of the rounds."""
        return median(self.values) if self.values else None

    @property
    def verdict(self) -> str:
        """Return yes, no, or not measured; a dash without a target."""
        if self.seen is None:
            return "not measured"
        if self.wanted is None:
            return "–"
        return "yes" if (self.seen <= self.wanted if self.at_most else self.seen >= self.wanted) else "no"


def figures(
    rows: Sequence[Row],
    server: str,
    workload: str,
    pattern: str,
    in_flight: int = 0,
    *,
    share: float = 0.0,
    field: str = "rate",
) -> Figures:
    """Return one figure of one measurement, by round."""
    wanted = (server, workload, pattern, in_flight, share)
    return {
        row["round"]: float(row[field])
        for row in rows
        if row["server"] != RAW
        and (row["server"], row["workload"], row["pattern"], row["in_flight"], row["share"]) == wanted
    }


def raw_figures(rows: Sequence[Row], workload: str, batch: int, field: str = "rate") -> Figures:
    """Return the figures of raw ONNX Runtime in batches of `rows`."""
    return {
        row["round"]: float(row[field])
        for row in rows
        if (row["server"], row["workload"]) == (RAW, workload) and row["rows"] == batch
    }


def divided(above: Figures, below: Figures) -> list[float]:
    """Divide the figures of the rounds that have both."""
    return [above[number] / below[number] for number in sorted(above.keys() & below.keys()) if below[number]]


def all_ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Return the table, in order."""
    return [*_tiny(rows), *_streams(rows), *_computing(rows), *_open(rows)]


def _tiny(rows: Sequence[Row]) -> list[Ratio]:
    ratios = []
    for callers in (32, 128):
        name = f"unary calls/s, tiny, {callers} in flight"
        ours = figures(rows, LANE, "tiny", UNARY, callers)

        def over(server: str, callers: int = callers, ours: Figures = ours) -> list[float]:
            return divided(ours, figures(rows, server, "tiny", UNARY, callers))

        ratios += [
            Ratio(name, "bare threaded echo", 4.2, over(ECHO)),
            Ratio(name, "Triton, no window", 2.2, over(TRITON)),
            Ratio(name, "mosec", 0.75, over(MOSEC)),
            *(Ratio(name, peer, 4, over(peer)) for peer in SLOW_PEERS),
        ]
        http = figures(rows, HTTP, "tiny", UNARY, callers)
        ratios += [
            Ratio(f"{name}, HTTP", "the lane" if server == LANE else server, wanted, over(server, ours=http))
            for server, wanted in ((LANE, 1.3), (MOSEC, 0.85), (LITSERVE, 8), (BENTOML, 10))
        ]
    few = [figures(rows, server, "tiny", UNARY, 8) for server in (LANE, TRITON)]
    large = [figures(rows, server, "256 KiB", UNARY, SIZES_IN_FLIGHT) for server in (HTTP, LANE)]
    alone = [figures(rows, server, "tiny", UNARY, 1, field="p50_ms") for server in (LANE, ECHO)]
    return [
        *ratios,
        Ratio("unary calls/s, tiny, 8 in flight", "Triton, no window", 2.3, divided(*few)),
        Ratio("unary calls/s, 256 KiB, 8 in flight, HTTP", "the lane", 0.9, divided(*large)),
        Ratio("p50, one call at a time, tiny", "bare threaded echo", 0.95, divided(*alone), at_most=True),
    ]


def _streams(rows: Sequence[Row]) -> list[Ratio]:
    ratios = []
    for pattern, name, echo in (
        (ONE_STREAM, "messages/s, tiny, one stream with 32 in flight", ECHO),
        (STREAMS, "messages/s, tiny, 32 streams", ECHO_STREAMS),
    ):
        ours = figures(rows, LANE, "tiny", pattern, 32)
        for server, label, wanted in ((echo, "bare threaded echo", 1.3), (TRITON, "Triton's stream", 2.6)):
            below = figures(rows, server, "tiny", pattern, 32)
            ratios.append(Ratio(name, label, wanted, divided(ours, below)))
    return ratios


def _computing(rows: Sequence[Row]) -> list[Ratio]:
    mlp = figures(rows, LANE, "mlp", UNARY, 32)
    name = "calls/s, MLP, 32 in flight"
    raw = "raw ONNX Runtime, same mean batch"
    return [
        Ratio("calls/s, transformer, 32 in flight", raw, 0.98, of_raw(rows, "transformer", 32)),
        Ratio(name, "Triton, no window", 1.2, divided(mlp, figures(rows, TRITON, "mlp", UNARY, 32))),
        Ratio(name, "mosec", 1, divided(mlp, figures(rows, MOSEC, "mlp", UNARY, 32))),
        Ratio(name, raw, 0.94, of_raw(rows, "mlp", 32)),
    ]


def of_raw(rows: Sequence[Row], workload: str, callers: int) -> list[float]:
    """Return the lane's rate over raw ONNX Runtime's in batches of the lane's mean size, by round."""
    rates = figures(rows, LANE, workload, UNARY, callers)
    batches = figures(rows, LANE, workload, UNARY, callers, field="mean_rows")
    values = []
    for number in sorted(rates):
        raw = raw_figures(rows, workload, round(batches[number]))
        if number in raw:
            values.append(rates[number] / raw[number])
    return values


def _open(rows: Sequence[Row]) -> list[Ratio]:
    ratios = []
    for workload, label in (("mlp", "MLP"), ("transformer", "transformer")):
        p99 = figures(rows, LANE, workload, OPEN, share=0.5, field="p99_ms")
        batch = raw_figures(rows, workload, MAX_BATCH_SIZE, "batch_seconds")
        values = divided(p99, {number: seconds * 1e3 for number, seconds in batch.items()})
        name = f"p99 at 50 % of capacity, open loop, {label}"
        ratios.append(Ratio(name, f"time of a batch of {MAX_BATCH_SIZE}", 3, values, at_most=True))
    p99 = figures(rows, LANE, "tiny", OPEN, share=0.8, field="p99_ms")
    name = "p99 at 80 % of capacity, open loop, tiny"
    return [*ratios, Ratio(name, "1 ms", 10, list(p99.values()), at_most=True)]


def wanted_text(ratio: Ratio) -> str:
    """Format a target, such as ≥ 2.5."""
    if ratio.wanted is None:
        return "–"
    return f"{'≤' if ratio.at_most else '≥'} {ratio.wanted:g}"


def seen_text(ratio: Ratio) -> str:
    """Format a result, such as 3.10 (2.95–3.20)."""
    if ratio.seen is None:
        return "–"
    return f"{ratio.seen:.2f} ({min(ratio.values):.2f}–{max(ratio.values):.2f})"


def table(everything: Sequence[Ratio]) -> str:
    """Return the measured ratios as a text table, and the number of ratios not measured."""
    cells: list[Callable[[Ratio], str]] = [
        lambda ratio: f"{ratio.name} ÷ {ratio.over}",
        wanted_text,
        seen_text,
        lambda ratio: ratio.verdict,
    ]
    lines = [["figure", "wanted", "seen (min–max)", "met"]]
    lines += [[cell(ratio) for cell in cells] for ratio in everything if ratio.values]
    widths = [max(len(line[at]) for line in lines) for at in range(len(cells))]
    text = "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    left_out = sum(not ratio.values for ratio in everything)
    return text + (f"\n({left_out} not measured)" if left_out else "")
