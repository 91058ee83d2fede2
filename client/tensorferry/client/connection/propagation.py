"""The caller's trace goes along with its calls, where the program uses OpenTelemetry.

OpenTelemetry is no dependency, and nothing of it is imported for the client's sake: a program that has not
imported it has no span that could be current.
"""

from __future__ import annotations

import sys

from tensorferry.client.connection.channel import CallMetadata


def with_context(metadata: CallMetadata) -> CallMetadata:
    """A call's metadata, and what the program's propagators say of the current context, if there is one.

    What the user gave counts before that: where it names a trace of its own, that is left as it is.
    """
    context = sys.modules.get("opentelemetry.context")
    if context is None or not context.get_current():
        return metadata
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    if not carrier:
        return metadata
    given = {name for name, _ in metadata}
    if "traceparent" in given:
        # The state of one trace means nothing to another.
        given.add("tracestate")
    added = ((name.lower(), value) for name, value in carrier.items() if name.lower() not in given)
    return (*metadata, *added)
