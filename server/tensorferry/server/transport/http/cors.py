"""Cross-origin resource sharing (CORS): which web pages of other sites may call the server, as browsers ask it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from tensorferry.server.config.option_groups.network import ANY_ORIGIN
from tensorferry.server.transport.http.answers import response
from tensorferry.server.transport.http.errors import v2_form
from tensorferry.server.transport.http.heads import Routed, Router
from tensorferry.server.transport.http.routes import Route, Target

# In seconds: the most for which Chromium keeps the answer to a preflight request.
_MAX_AGE = 7200
# Headers of responses that pages could not read otherwise. The official clients use them.
_EXPOSED = "Inference-Header-Content-Length, Retry-After, retry-after-ms, x-should-retry"
# As a request for health is served, because browsers send no token with it: it is answered at once, and counts as no call.
_PREFLIGHT = Target(Route("OPTIONS", "ServerLive", lambda message, parts: response(200, b"")), {})


def cross_origin(route: Router, origins: Collection[str]) -> Router:
    """Return a router to what `route` serves, which pages of these origins may call, too.

    Methods that change the server are refused to every page, by `route` itself.
    """
    return partial(_routed, route, origins)


def _routed(
    route: Router, origins: Collection[str], method: str, path: str, fields: Mapping[str, str]
) -> Routed:
    origin = fields.get("origin", "")
    if origin and ANY_ORIGIN in origins:
        lines = ["Access-Control-Allow-Origin: *"]
    elif origin in origins:
        lines = [f"Access-Control-Allow-Origin: {origin}", "Vary: Origin"]
    else:
        # So that a cache does not give the page of an allowed origin a response without the header.
        varies = b"" if ANY_ORIGIN in origins else b"Vary: Origin"
        return route(method, path, fields)._replace(lines=varies)
    if method == "OPTIONS" and "access-control-request-method" in fields:
        lines += ["Access-Control-Allow-Methods: GET, HEAD, POST", f"Access-Control-Max-Age: {_MAX_AGE}"]
        if asked := fields.get("access-control-request-headers"):
            lines.append(f"Access-Control-Allow-Headers: {asked}")
        return Routed(_PREFLIGHT, v2_form, _joined(lines))
    # Without the header by which a browser says that the page is of another site, which would be refused.
    known = {name: value for name, value in fields.items() if name != "sec-fetch-site"}
    lines.append(f"Access-Control-Expose-Headers: {_EXPOSED}")
    return route(method, path, known)._replace(lines=_joined(lines))


def _joined(lines: list[str]) -> bytes:
    return "\r\n".join(lines).encode("latin-1")
