"""Routes of the metrics server for health, the status page and its data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any

from tensorferry.server.observability.monitoring.http_server import HttpResponse, Route
from tensorferry.server.observability.monitoring.status_report import StatusReport
from tensorferry.server.transport.http.answers import TEXT

_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def routes_of(status: StatusReport, report: Callable[[], dict[str, Any]]) -> Mapping[str, Route]:
    """Return the routes `/`, `/status.json`, `/healthz` and `/readyz`.

    `report` returns the status of all processes, `status` whether this one is ready.
    """
    page = (
        files("tensorferry.server.observability.monitoring")
        .joinpath("status.html")
        .read_text(encoding="utf-8")
    )
    html = HttpResponse(
        page.encode(),
        "text/html; charset=utf-8",
        headers={"Content-Security-Policy": content_security_policy(page)},
    )
    return {
        "/": lambda accept: html,
        "/status.json": partial(_status, report),
        "/healthz": lambda accept: HttpResponse(b"alive\n", TEXT),
        "/readyz": partial(_readiness, status),
    }


def content_security_policy(page: str) -> str:
    """Return a Content-Security-Policy that permits only the page's own script, style and server."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(_SCRIPT, page)}",
            f"style-src {_hashes(_STYLE, page)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hashes(element: re.Pattern[str], page: str) -> str:
    """Return the hashes of these elements for the policy, so that injected content does not run."""
    digests = [hashlib.sha256(text.encode()).digest() for text in element.findall(page)]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def _status(report: Callable[[], dict[str, Any]], accept: str) -> HttpResponse:
    body = json.dumps(report(), separators=(",", ":"), allow_nan=False)
    return HttpResponse(body.encode(), "application/json")


def _readiness(report: StatusReport, accept: str) -> HttpResponse:
    ready = report.ready()
    lines = ["ready" if ready else "not ready", *report.problems()]
    text = "".join(f"{' '.join(line.split())}\n" for line in lines)
    return HttpResponse(text.encode(errors="backslashreplace"), TEXT, 200 if ready else 503)
