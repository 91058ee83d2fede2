"""W3C Trace Context in the metadata of a call."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

# Version, trace id, span id, flags. Versions after 00 may append fields.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 1

# The specification requires only 512 characters to be passed on. A longer state is dropped.
_MAX_STATE = 512


class TraceContext(NamedTuple):
    """Span of another process. Its ids are hexadecimal digits, so they are safe in log lines.

    `sampled` is true if the caller records the trace. `state` is the value of `tracestate`.
    """

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The value of the metadata `traceparent`."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def parse_trace_context(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """Return the caller's span from a call's metadata; None if it is missing or malformed.

    Malformed metadata is not an error, because clients may send anything.
    """
    parent: str | bytes | None = None
    state = ""
    for name, value in metadata:
        if name == TRACEPARENT:
            if parent is not None:
                # Two values are ambiguous.
                return None
            parent = value
        elif name == TRACESTATE:
            state = f"{state},{value!s}" if state else str(value)
    return None if parent is None else _parsed(str(parent), state)


def _parsed(parent: str, state: str) -> TraceContext | None:
    match = _TRACEPARENT.fullmatch(parent)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(trace_id, span_id, sampled, state if len(state) <= _MAX_STATE else "")
