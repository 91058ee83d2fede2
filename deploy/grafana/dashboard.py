"""Generator of tensorferry.json, the dashboard for Grafana: python deploy/grafana/dashboard.py

Its contents are in panels.py: change them there, and generate the file again. Import the file into
Grafana (10 or newer), or put it where a dashboard provider finds it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from panels import ROWS, Panel

FILE = Path(__file__).with_name("tensorferry.json")

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24

Json = dict[str, Any]


def variable(name: str, label: str, query: str) -> Json:
    """Return a variable of the dashboard, with several values or all."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def panel(number: int, one: Panel, x: int, y: int) -> Json:
    """Return a panel in Grafana's format."""
    heatmap = one.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + at),
            "datasource": _SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "format": "heatmap" if heatmap else "time_series",
            "exemplar": one.exemplars,
            "range": True,
        }
        for at, query in enumerate(one.queries)
    ]
    steps = [{"value": value, "color": color} for value, color in one.thresholds] or [
        {"value": None, "color": "green"}
    ]
    defaults: Json = {"unit": one.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if one.most is not None:
        defaults["max"] = one.most
    options: Json = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if one.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 25 if one.stack else 8,
            "stacking": {"mode": "normal" if one.stack else "none"},
        }
    elif one.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    else:
        options = {
            "calculate": False,
            "yAxis": {"unit": one.unit},
            "color": {"mode": "scheme", "scheme": "Blues"},
        }
    return {
        "id": number,
        "type": one.kind,
        "title": one.title,
        "description": one.meaning,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": one.width, "h": one.height},
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def dashboard() -> Json:
    """Return the whole dashboard."""
    panels: list[Json] = []
    y = 0
    for title, row in ROWS.items():
        number = len(panels) + 1
        panels.append(
            {
                "id": number,
                "type": "row",
                "title": title,
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = height = 0
        for one in row:
            if x + one.width > _COLUMNS:
                x, y = 0, y + height
            panels.append(panel(len(panels) + 1, one, x, y))
            x, height = x + one.width, one.height
        y += height
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "tensorferry",
        "title": "tensorferry",
        "description": "Requests, latencies, batches, queues and devices of tensorferry; see docs/reference/metrics.md.",
        "tags": ["inference", "tensorferry"],
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "editable": True,
        "graphTooltip": 1,
        "templating": {
            "list": [
                source,
                variable("job", "Job", "label_values(tensorferry_server_info, job)"),
                variable(
                    "instance", "Server", 'label_values(tensorferry_server_info{job=~"$job"}, instance)'
                ),
                variable(
                    "model",
                    "Model",
                    'label_values(tensorferry_model_ready{job=~"$job",instance=~"$instance"}, model)',
                ),
            ]
        },
        "panels": panels,
    }


def text() -> str:
    """Return the text of the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
