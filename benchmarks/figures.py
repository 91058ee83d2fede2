"""Figures of several panels as small SVG files. Needs matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def prepare(folder: Path) -> None:
    """Set up matplotlib and the folder; raise SystemExit without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise SystemExit("the plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("svg")
    # Text stays text, and the same numbers give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tensorferry", "font.size": 9})
    folder.mkdir(parents=True, exist_ok=True)


def panels(count: int) -> tuple[Any, Any]:
    """Return a figure and its panels, side by side."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, found = pyplot.subplots(1, count, figsize=(max(3.2 * count, 8), 3.5), layout="constrained")
    return figure, found


def save(figure: Any, first: Any, path: Path) -> Path:
    """Write the figure with the legend of one panel, and return its path."""
    handles, names = first.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    return path
