"""Trace context in call metadata, if the program uses OpenTelemetry.

OpenTelemetry is not a dependency. The client never imports it first: a program that has not
imported it has no current span.
"""

from __future__ import annotations

import sys

from tensorferry.client.connection.channel import CallMetadata


def with_context(metadata: CallMetadata) -> CallMetadata:
    """Return a call's metadata with the current trace context, as the program's propagators write it.

    The caller's metadata takes precedence: a trace context in it is kept.
    """
    # None also while another thread imports the module.
    get_current = getattr(sys.modules.get("opentelemetry.context"), "get_current", None)
    if get_current is None or not get_current():
        return metadata
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    if not carrier:
        return metadata
    given = {name for name, _ in metadata}
    if "traceparent" in given:
        # The tracestate of another trace does not apply.
        given.add("tracestate")
    added = ((name.lower(), value) for name, value in carrier.items() if name.lower() not in given)
    return (*metadata, *added)
