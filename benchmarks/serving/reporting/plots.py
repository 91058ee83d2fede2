"""Plots of the page, as small SVG files. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import panels, prepare, save

from serving.plan import OPEN, RAW, SHARES, SIZES_IN_FLIGHT, UNARY
from serving.reporting.ratios import Row
from serving.reporting.tables import UNARY_IN_FLIGHT, middle
from serving.servers import (
    BENTOML,
    ECHO,
    ECHO_ASYNCIO,
    HTTP,
    LANE,
    LITSERVE,
    MLSERVER,
    MOSEC,
    PYTRITON,
    RAY,
    THREADED,
    TRITON,
    TRITON_WINDOW,
)
from serving.workloads import SIZES

COLORS = {
    LANE: ("tab:blue", "-"), THREADED: ("tab:blue", "--"), HTTP: ("tab:cyan", "-"), MOSEC: ("tab:orange", "-"),
    TRITON: ("tab:green", "-"), TRITON_WINDOW: ("tab:green", "--"), ECHO: ("black", ":"),
    ECHO_ASYNCIO: ("grey", ":"), PYTRITON: ("tab:olive", "-"), MLSERVER: ("tab:red", "-"),
    LITSERVE: ("tab:purple", "-"), BENTOML: ("tab:brown", "-"), RAY: ("tab:pink", "-"),
}  # fmt: skip


def write(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Write all plots to the folder; return their paths."""
    prepare(folder)
    return [
        _tiny(folder / "serving.svg", rows),
        _models(folder / "serving_models.svg", rows),
        _open(folder / "serving_open.svg", rows),
    ]


def _lines(panel: Any, rows: Sequence[Row], points: Sequence[tuple[float, dict[str, Any]]]) -> None:
    """Plot one line per server, of the medians at these places."""
    for name, (color, style) in COLORS.items():
        found = [(at, middle(rows, name, **asked)) for at, asked in points]
        shown = [(at, value) for at, value in found if value is not None]
        if shown:
            places, values = zip(*shown, strict=True)
            panel.plot(
                places, values, style, color=color, label=name, linewidth=1.3, marker=".", markersize=4
            )


def _tiny(path: Path, rows: Sequence[Row]) -> Path:
    figure, axes = panels(2)
    for panel, field in zip(axes, ("rate", "p50_ms"), strict=True):
        asked = [
            (callers, {"workload": "tiny", "pattern": UNARY, "in_flight": callers, "field": field})
            for callers in UNARY_IN_FLIGHT
        ]
        _lines(panel, rows, asked)
        panel.set(xscale="log", yscale="log", xlabel="calls in flight", xticks=UNARY_IN_FLIGHT)
        panel.set_xticklabels([str(callers) for callers in UNARY_IN_FLIGHT])
        panel.minorticks_off()
    axes[0].set(title="tiny model, unary", ylabel="calls/s")
    axes[1].set(title="tiny model, unary", ylabel="p50, ms")
    return save(figure, axes[0], path)


def _models(path: Path, rows: Sequence[Row]) -> Path:
    figure, axes = panels(3)
    for panel, workload in zip(axes, ("mlp", "transformer"), strict=False):
        bars = [(name, middle(rows, name, workload, UNARY, 32, "rate")) for name in COLORS]
        shown = sorted(((value, name) for name, value in bars if value is not None))
        panel.barh(
            [name for _, name in shown], [value for value, _ in shown], color=[COLORS[n][0] for _, n in shown]
        )
        full = [
            row["rate"]
            for row in rows
            if row["server"] == RAW and (row["workload"], row["rows"]) == (workload, 32)
        ]
        if full:
            panel.axvline(sorted(full)[len(full) // 2], color="black", linestyle=":", linewidth=1)
        panel.set(title=f"{workload}, 32 in flight", xlabel="calls/s (dotted: raw ONNX Runtime)")
    sizes = [
        (
            size.width * 4,
            {"workload": size.name, "pattern": UNARY, "in_flight": SIZES_IN_FLIGHT, "field": "rate"},
        )
        for size in SIZES
    ]
    _lines(axes[2], rows, sizes)
    axes[2].set(
        title="Identity, 8 in flight", xlabel="bytes each way", ylabel="calls/s", xscale="log", yscale="log"
    )
    return save(figure, axes[2], path)


def _open(path: Path, rows: Sequence[Row]) -> Path:
    figure, axes = panels(3)
    for panel, workload in zip(axes, ("tiny", "mlp", "transformer"), strict=True):
        asked = [
            (
                share,
                {"workload": workload, "pattern": OPEN, "in_flight": 0, "field": "p99_ms", "share": share},
            )
            for share in SHARES
        ]
        _lines(panel, rows, asked)
        panel.set(title=f"{workload}, open loop", xlabel="load / own capacity", xticks=SHARES)
        panel.set_ylim(bottom=0)
    axes[0].set_ylabel("p99, ms")
    return save(figure, axes[0], path)
