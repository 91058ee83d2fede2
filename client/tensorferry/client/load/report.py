"""The report of `--html`: one file with its data and plots, which needs no network."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from tensorferry.client.load.comparison import compare
from tensorferry.client.load.result_file import Document, steps_of


def write_report(path: Path, contents: Document, other: Document | None = None, other_name: str = "") -> None:
    """Write the results of one test, and how they differ from an earlier one. Raises OSError if that fails."""
    path.write_text(page(contents, other, other_name), encoding="utf-8")


def page(contents: Document, other: Document | None = None, other_name: str = "") -> str:
    """Return the page with the results of one test, and what differs from another."""
    differences = [] if other is None else compare(steps_of(contents), steps_of(other))
    data = {
        "results": contents,
        "other": other,
        "other_name": other_name,
        "differences": [{**asdict(one), "step": one.step.label, "change": one.change} for one in differences],
    }
    # No text of a server can end the script: "<" is escaped.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    return template.replace("__RESULTS__", text)
