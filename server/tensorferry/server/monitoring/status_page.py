"""Health, the status page, and what that reads, as routes of the metrics server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import partial
from importlib.resources import files

from tensorferry.server.monitoring.http_server import TEXT, HttpResponse, Route
from tensorferry.server.monitoring.status_report import StatusReport

_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def routes_of(report: StatusReport) -> Mapping[str, Route]:
    """`/`, `/status.json`, `/healthz` and `/readyz`."""
    page = files("tensorferry.server.monitoring").joinpath("status.html").read_text(encoding="utf-8")
    shown = HttpResponse(
        page.encode(), "text/html; charset=utf-8", headers={"Content-Security-Policy": policy_of(page)}
    )
    return {
        "/": Route(lambda accept: shown),
        "/status.json": Route(partial(_status, report)),
        "/healthz": Route(lambda accept: HttpResponse(b"alive\n", TEXT)),
        "/readyz": Route(partial(_readiness, report)),
    }


def policy_of(page: str) -> str:
    """What a browser lets the page do: run its own script, have its own style, and ask this server."""
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
    """Of what is in these elements, as a policy names it; nothing else runs, whatever gets into the page."""
    digests = [hashlib.sha256(text.encode()).digest() for text in element.findall(page)]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def _status(report: StatusReport, accept: str) -> HttpResponse:
    body = json.dumps(report.report(), separators=(",", ":"), allow_nan=False)
    return HttpResponse(body.encode(), "application/json")


def _readiness(report: StatusReport, accept: str) -> HttpResponse:
    ready = report.ready()
    lines = ["ready" if ready else "not ready", *report.troubles()]
    text = "".join(f"{' '.join(line.split())}\n" for line in lines)
    return HttpResponse(text.encode(errors="backslashreplace"), TEXT, 200 if ready else 503)
