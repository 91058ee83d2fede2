"""Metrics pages of several server processes as one page: the series of each process have its number as a label.

Sums would fall when a process is replaced, and Prometheus would count what is left of them again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tensorferry.server.observability.monitoring.metrics.metric_names import ProcessMetric

LABEL = "process"

_END = "# EOF"
_NAME = re.compile(r"[a-zA-Z_:][\w:]*", re.ASCII)
# Of the server as a whole: the pages of all processes have the same.
_COMMON = frozenset(metric.on_page for metric in ProcessMetric)


def labelled_page(page: bytes, process: int) -> bytes:
    """Return the page of `Metrics.page` with the label of this process in each of its own series."""
    # Not splitlines, because labels may contain other line separators.
    return "\n".join([_labelled(line, process) for line in page.decode().split("\n")]).encode()


def _labelled(line: str, process: int) -> str:
    name = _NAME.match(line)
    if name is None or name[0] in _COMMON:
        return line
    rest = line[name.end() :]
    inner = f",{rest[1:]}" if rest.startswith("{") else f"}}{rest}"
    return f'{name[0]}{{{LABEL}="{process}"{inner}'


def joined_page(pages: Sequence[bytes]) -> bytes:
    """Return one page of labelled ones: each metric once, with the series of all pages."""
    metrics: dict[str, list[str]] = {}
    end: list[str] = []
    for number, page in enumerate(pages):
        lines: list[str] = []
        for line in page.decode().split("\n"):
            if line in (_END, ""):
                end.append(line)
            elif line.startswith("# "):
                lines = metrics.setdefault(line.split(" ", 3)[2], [])
                if line not in lines:
                    lines.append(line)
            elif not number or line.partition("{")[0].partition(" ")[0] not in _COMMON:
                lines.append(line)
    last = [_END, ""] if _END in end else [""]
    return "\n".join([*(line for lines in metrics.values() for line in lines), *last]).encode()
